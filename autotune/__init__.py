"""Find, prove, forecast and apply the fastest stable vLLM configuration for a long evaluation run."""

__version__ = "0.1.0"
