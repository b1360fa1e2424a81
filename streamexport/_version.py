"""The package's version, alone in a file that builds and imports without anything else."""

__version__ = "0.1.0"
