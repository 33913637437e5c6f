"""``python -m torch_thor.bench STUDY``."""

from torch_thor.bench.study import main
from torch_thor.training.errors import UserError

if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from error
