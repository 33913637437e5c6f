"""``python -m benchmarks NAME``: runs a benchmark; without a name it lists them."""

import ast
import sys
from importlib import import_module
from pathlib import Path

from torch_thor.cli import INTERRUPTED, USER_ERROR
from torch_thor.errors import UserError, require, visible

FOLDER = Path(__file__).parent


def benchmarks() -> dict[str, str]:
    """Return what each benchmark is about, by name; a helper has no `jobs` and no `main`."""
    found = {}
    for file in sorted([*FOLDER.glob("[!_]*.py"), *FOLDER.glob("*/__init__.py")]):
        tree = ast.parse(file.read_text(encoding="utf-8"))  # importing them all would take seconds
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if names & {"jobs", "main"}:
            name = file.parent.name if file.stem == "__init__" else file.stem
            found[name] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def run(words: list[str]) -> None:
    """Run the benchmark that the first word names with the other words."""
    known = benchmarks()
    if not words or words[0] in ("-h", "--help"):
        print("python -m benchmarks NAME [OPTIONS], where --help describes the options:\n")
        for name, about in known.items():
            print(f"{name:{max(map(len, known))}}  {about}")
        return
    from benchmarks.runner import study  # may need what is not installed, which main() tells
    from torch_thor.training.recipe_keys import nearest

    name, *rest = words
    require(
        name in known,
        f"{name}: there is no such benchmark{nearest(name, list(known))}; give one of "
        f"{', '.join(known)}",
    )
    module = import_module(f"benchmarks.{name}")
    sys.argv = [f"python -m benchmarks {name}", *rest]
    if hasattr(module, "main"):
        module.main()
    else:
        study.main(module)


def main() -> None:
    """Run a benchmark, and turn errors of its user into lines and an exit code."""
    try:
        run(sys.argv[1:])
    except UserError as error:
        sys.stderr.writelines(f"benchmarks: {visible(line)}\n" for line in str(error).splitlines())
        raise SystemExit(USER_ERROR) from error
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("benchmarks", "torch_thor"):
            raise
        sys.stderr.write(f"benchmarks: {error.name} is missing: `pip install -e '.[bench]'`\n")
        raise SystemExit(USER_ERROR) from error
    except KeyboardInterrupt:
        sys.stderr.write("benchmarks: stopped by Ctrl-C; the same command goes on\n")
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
