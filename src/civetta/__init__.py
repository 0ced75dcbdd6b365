"""civetta: an inference engine for the qwen4_exp model family."""

__version__ = "0.1.0"
