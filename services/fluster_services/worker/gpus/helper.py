"""`python -m fluster_services.worker.gpus.helper`: reads GPUs for each line that it is sent, and says what it does while it does it.

The line is a JSON list of indices to leave out. Each answer is lines of JSON: {"count": 2}, for each GPU {"begin": 0} and then
{"gpus": [...]}, at last {"end": {...}}. Who reads them sees at which GPU the driver hangs, and has what was read before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

from fluster.json_lines import encoded
from fluster_bus.core.json_types import JsonObject
from fluster_services.worker.gpus.inventory import gpu_as_json


def main() -> None:
    try:
        from fluster_services.worker.gpus.nvml import NO_LIBRARY, Nvml, NvmlError, why_unavailable
    except ImportError as error:
        sys.stdin.buffer.readline()
        _say({"end": {"no_library": True, "trouble": f"{error}: pip install 'fluster[gpu]'"}})
        return

    nvml: Nvml | None = None

    def read(left_out: list[int]) -> Iterator[JsonObject]:
        nonlocal nvml
        try:
            nvml = nvml or Nvml()
            count = nvml.count()
            driver, cuda = nvml.versions()
            yield {"count": count, "driver": driver, "cuda": cuda}
            gpus = []
            for index in range(count):
                if index not in left_out:
                    yield {"begin": index}
                    found = nvml.read(index)
                    gpus += found
                    yield {"gpus": [gpu_as_json(gpu) for gpu in found]}
            pairs = nvml.pairs(gpus)
            if any(gpu.fault for gpu in gpus):  # what a session has lost it does not find again
                nvml.close()
                nvml = None
            yield {"end": {"pairs": [asdict(pair) for pair in pairs]}}
        except NvmlError as error:
            if nvml is not None:
                nvml.close()
                nvml = None
            yield {"end": {"no_library": error.value == NO_LIBRARY, "trouble": why_unavailable(error)}}

    for line in sys.stdin.buffer:  # until the worker is gone
        for said in read(json.loads(line)):
            _say(said)


def _say(said: dict[str, object]) -> None:
    sys.stdout.buffer.write(encoded(said))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
