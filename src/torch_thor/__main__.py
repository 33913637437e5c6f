"""Runs the command line `torch-thor` as `python -m torch_thor`."""

from torch_thor.cli import main

main()
