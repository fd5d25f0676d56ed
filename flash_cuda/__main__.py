import sys

from flash_cuda.cli import main

if __name__ == "__main__":
    sys.exit(main())
