"""Tables on the disk as uncompressed Arrow IPC files: written whole or not at all, read by mapping them to memory."""

from pathlib import Path
from typing import Any

from torch_thor.files import whole_file
from torch_thor.training.output_files import writing

REMEDY = "make room for it, then give the same command again: what is finished stays"


def write_table(path: Path, columns: dict[str, Any], types: dict[str, Any]) -> None:
    """Write a table.

    Args:
        path: The file. A `UserError` names it where it cannot be written.
        columns: Values by name.
        types: Arrow types by the same names.
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
        path: The file.

    Returns:
        A `pyarrow.Table`; its pages are read from the disk when they are used, and can be given back.
    """
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()
