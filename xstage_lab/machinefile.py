"""Files that describe machines or links: those of `data/`, and users' own of the same form."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xstage_lab.errors import FileRejected, InvalidValue, XStageError
from xstage_lab.spec import LinkSpec, MachineSpec
from xstage_lab.tables import check_header, read_rows, scaled, to_si

_STORE_COLUMNS = (
    "topology", "store_gb_per_s_measured", "store_gb_per_s_low", "store_gb_per_s_high",
    "measured_by", "ingress_gb_per_s", "per_sm_gb_per_s", "issue_latency_us",
    "path_capacity_mib", "per_sm_capacity_kib", "credit_kib", "credit_latency_us", "assumed",
    "source",
)  # fmt: skip
#: Columns of a link file.
LINK_COLUMNS = ("link", "gb_per_s_vendor", *_STORE_COLUMNS)
#: Columns of a machine file.
MACHINE_COLUMNS = (
    "machine", "sms", "clock_mhz", "smem_per_cta_kib", "max_gpus", "bf16_tflops_vendor",
    "bf16_tflops_measured", "fp8_tflops_vendor", "fp8_tflops_measured", "hbm_tb_per_s", "l2_mib",
    "link", "link_gb_per_s_vendor", *_STORE_COLUMNS,
)  # fmt: skip
_COUNTS = ("n_sms", "max_gpus")
_TEXT = {"machine", "link", "topology", "measured_by", "assumed", "source"}

# SI name of a column -> field of a spec, where the two differ.
_FIELD = {
    "sms": "n_sms",
    "link_vendor_bytes_per_s": "vendor_bytes_per_s",
    "store_measured_bytes_per_s": "egress_bytes_per_s",
    "store_low_bytes_per_s": "egress_low_bytes_per_s",
    "store_high_bytes_per_s": "egress_high_bytes_per_s",
    "bf16_measured_flop_per_s": "bf16_flop_per_s",
    "bf16_vendor_flop_per_s": "bf16_flop_per_s",
    "fp8_measured_flop_per_s": "fp8_flop_per_s",
    "fp8_vendor_flop_per_s": "fp8_flop_per_s",
}
_OF_LINK = {field.name for field in dataclasses.fields(LinkSpec)}


def load_user_file(path: str | Path) -> dict[str, MachineSpec | LinkSpec]:
    """Read machines or links from a CSV file.

    Parameters
    ----------
    path : str or Path
        A file with columns of `MACHINE_COLUMNS`, or of `LINK_COLUMNS` where no column is called
        `machine`; any unit of the same quantity will do. Columns may be left out and cells left
        empty: not known. The column `assumed` names the columns whose figure in that row is
        supposed, not measured.

    Returns
    -------
    dict
        By name, in the order of the file.

    Raises
    ------
    FileRejected
        Naming the file, the row (1 is the header), the column and the reason.
    """
    header, rows = read_rows(path)
    of_machines = "machine" in header
    check_header(path, header, MACHINE_COLUMNS if of_machines else LINK_COLUMNS, _TEXT)
    found: dict[str, MachineSpec | LinkSpec] = {}
    for number, cells in rows:
        filled = {column: cell for column, cell in zip(header, cells, strict=True) if cell}
        row = _Row(path, number, filled)
        spec = row.machine() if of_machines else row.link(row.needed("link"))
        if spec.name in found:
            raise row.rejected(
                "machine" if of_machines else "link",
                f"{spec.name!r} stands in an earlier row already; a name may stand once.",
            )
        found[spec.name] = spec
    return found


@dataclass(frozen=True)
class _Row:
    """One row that is to become a machine or a link; empty cells are left out of `cells`."""

    path: str | Path
    number: int
    cells: dict[str, str]

    def rejected(self, column: str, reason: str) -> FileRejected:
        return FileRejected(self.path, reason, f"row {self.number}, column {column!r}")

    def needed(self, column: str) -> str:
        if column not in self.cells:
            raise self.rejected(column, "is missing or empty; every row needs it.")
        return self.cells[column]

    def machine(self) -> MachineSpec:
        name = self.needed("machine")
        for column in ("sms", "max_gpus"):
            self.needed(column)
        link = self.link(self.cells.get("link", f"{name} link"))
        fields, assumed = self._fields()
        si_names = {to_si(column)[0] for column in self.cells}
        for dtype in ("bf16", "fp8"):
            if f"{dtype}_flop_per_s" in fields and f"{dtype}_measured_flop_per_s" not in si_names:
                assumed.add(f"{dtype}_flop_per_s")  # the vendor's claim
        own = {field: value for field, value in fields.items() if field not in _OF_LINK}
        try:
            return MachineSpec(
                name=name,
                link=link,
                assumed=frozenset(assumed - _OF_LINK),
                source=self.cells.get("source", ""),
                **own,
            )
        except XStageError as error:
            raise self._explained(error) from None

    def link(self, name: str) -> LinkSpec:
        fields, assumed = self._fields()
        own = {field: value for field, value in fields.items() if field in _OF_LINK}
        low, high = (own.get(f"egress_{end}_bytes_per_s", math.nan) for end in ("low", "high"))
        if low > high or own.get("egress_bytes_per_s", low) < low:
            raise self.rejected(
                self._column("egress_low_bytes_per_s"),
                "the low end is above the measured rate or the high end of its range.",
            )
        if own.get("egress_bytes_per_s", high) > high:
            raise self.rejected(
                self._column("egress_high_bytes_per_s"),
                "the high end is below the measured rate.",
            )
        try:
            return LinkSpec(
                name=name,
                assumed=frozenset(assumed & _OF_LINK),
                source=self.cells.get("measured_by", self.cells.get("source", "")),
                **own,
            )
        except XStageError as error:
            raise self._explained(error) from None

    def _fields(self) -> tuple[dict[str, Any], set[str]]:
        """Return the values of all filled cells by field, SI, and the fields supposed."""
        fields: dict[str, Any] = {}
        for column, cell in self.cells.items():
            si_name, scale = to_si(column)
            field = _FIELD.get(si_name, si_name)
            if column == "topology":
                fields[field] = cell
            if column in _TEXT:
                continue
            value = self._number(column, cell)
            if field in _COUNTS and value.is_integer():
                fields[field] = int(value)
            elif "vendor" not in si_name or field not in fields:  # what was measured counts
                fields[field] = scaled(value, scale)
        assumed = set()
        for column in self.cells.get("assumed", "").split():
            if column not in self.cells or column in _TEXT:
                raise self.rejected("assumed", f"{column!r} is no column with a figure in it.")
            assumed.add(_FIELD.get(to_si(column)[0], to_si(column)[0]))
        return fields, assumed

    def _number(self, column: str, cell: str) -> float:
        try:
            value = float(cell)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise self.rejected(
                column, f"{cell!r} is not a number. Leave the cell empty if it is not known."
            )
        return value

    def _column(self, field: str) -> str:
        """Return the column of this row that fills `field`."""
        of_field = {_FIELD.get(to_si(c)[0], to_si(c)[0]): c for c in self.cells}
        return of_field.get(field, field)

    def _explained(self, error: XStageError) -> FileRejected:
        """Return what a spec refused, said of the cell it came from."""
        if not isinstance(error, InvalidValue):
            return self.rejected("topology", str(error))
        field = error.field.rpartition(" ")[2]
        remedy = "" if field in _COUNTS else " Leave the cell empty if the figure is not known."
        return self.rejected(self._column(field), f"{error}{remedy}")
