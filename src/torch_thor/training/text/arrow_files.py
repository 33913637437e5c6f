"""Tables in uncompressed Arrow IPC files, which are written atomically and read through memory mapping."""

from pathlib import Path
from typing import Any

from torch_thor.files import whole_file
from torch_thor.training.errors import UserError, first_line
from torch_thor.training.output_files import writing

AGAIN = "delete its folder, then prepare the corpus again"  # `prepare` leaves a finished corpus as it is
REMEDY = "make room for it, then give the same command again: what is finished stays"


def write_table(path: Path, columns: dict[str, Any], types: dict[str, Any]) -> None:
    """Write a table to a file.

    Args:
        path: The path of the file.
        columns: The values of each column, by name.
        types: The Arrow type of each column, by name.

    Raises:
        UserError: If the file cannot be written; the message names the file.
    """
    import pyarrow as pa

    schema = pa.schema(list(types.items()))
    table = pa.table({name: pa.array(columns[name], type=types[name]) for name in types}, schema=schema)
    with (
        writing(path, REMEDY),
        whole_file(path) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
    ):
        writer.write_table(table)


def read_table(path: Path) -> Any:
    """Map a table into memory.

    Args:
        path: The path of the file.

    Returns:
        A `pyarrow.Table`. The operating system loads its memory pages from the disk on access and can release them.

    Raises:
        UserError: If the file is missing, cannot be read, or is no complete Arrow file; the message names the file.
    """
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_file(source).read_all()
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: {AGAIN}") from error
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}): {AGAIN}") from error
