"""The machines of a cluster."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import typer

from fluster.cli.common.options import Options
from fluster.cli.common.output import size, write_json, write_table

if TYPE_CHECKING:
    from fluster_bus.messages.nodes import NodeInfo, NodeStatus


def nodes(context: typer.Context) -> None:
    """List the machines that workers are on: what each has, which versions are there, and when it was last heard.

    What a machine has is more than its workers offer: `fluster workers` shows that. JSON has each GPU, with UUID, memory and,
    where it is of no use, why.

    Try:
      fluster nodes
      fluster --output json nodes
    """
    options = Options.of(context)
    with options.connect() as cluster:
        found = cluster.list_nodes()
    if options.json:
        write_json([node.model_dump(mode="json") for node in found])
        return
    columns = ["HOST", "STATE", "LAST SIGN", "CPUS", "MEMORY", "DISK", "GPUS", "DRIVER", "FLUSTER", "PYTHON", "WORKERS"]
    write_table(columns, [_row(node) for node in found])


def _row(node: NodeStatus) -> list[str]:
    info = node.info
    return [
        node.host,
        "alive" if node.alive else "lost",
        f"{node.silent_for_s:.0f}s ago",
        str(info.cpus or "-"),
        size(info.memory) if info.memory else "-",
        size(info.disk) if info.disk else "-",
        _gpus(info),
        f"{info.gpu_driver} (CUDA {info.cuda})" if info.gpu_driver else "-",
        ", ".join(node.versions),
        ", ".join(node.pythons),
        ", ".join(node.workers),
    ]


def _gpus(info: NodeInfo) -> str:
    """`2 x NVIDIA H100 80GB HBM3, 1 unwell`; a divided GPU is told by its instances."""
    counts = Counter(gpu.model or "of an unknown model" for gpu in info.gpus if not gpu.divided and not gpu.fault)
    unwell = sum(bool(gpu.fault) for gpu in info.gpus)
    told = [f"{count} x {model}" for model, count in sorted(counts.items())]
    told += [f"{unwell} unwell"] if unwell else []
    return ", ".join(told) or ("cannot be read" if info.gpu_trouble else "-")
