"""The errors that carry a meaning beyond their text."""


class UsageError(Exception):
    """Bad input. One line: what is wrong and what would be right. The command ends with exit code 2."""


class LayoutError(RuntimeError):
    """An activation was used in a layout that the operation does not take."""


class PeerLost(RuntimeError):
    """A collective failed because another rank died, hung or fell behind; this rank is not the culprit."""


class Disagreement(RuntimeError):
    """The ranks were about to do different things in one collective (--check-ranks)."""
