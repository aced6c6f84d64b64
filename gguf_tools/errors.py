"""The one exception of this package."""


class GGUFError(ValueError):
    """A GGUF file is damaged, not what was asked for, or cannot be converted; the message is one clear sentence."""
