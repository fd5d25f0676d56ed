"""The one exception of a failed build."""


class BuildError(SystemExit):
    """Ends the build with one sentence that says what to do, and without a traceback."""

    def __init__(self, sentence: str) -> None:
        super().__init__(f"flash_cuda: {sentence}")

    def __str__(self) -> str:
        return str(self.code)
