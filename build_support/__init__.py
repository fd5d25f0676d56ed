"""What setup.py decides before it compiles: toolkit, architectures, jobs. Not part of the wheel."""
