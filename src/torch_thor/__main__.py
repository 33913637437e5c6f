"""`python -m torch_thor` is `torch-thor`."""

from torch_thor.cli import main

main()
