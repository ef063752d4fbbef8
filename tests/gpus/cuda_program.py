"""`python -m tests.gpus.cuda_program [BYTES]`: what CUDA's driver shows this process, as JSON; holds memory until its stdin ends."""

import ctypes
import json
import sys
from typing import Any


def main() -> None:
    held = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    cuda = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_int(0)
    said: dict[str, Any] = {"init": cuda.cuInit(0), "devices": []}
    cuda.cuDeviceGetCount(ctypes.byref(count))
    for ordinal in range(count.value):
        device, context = ctypes.c_int(), ctypes.c_void_p()
        uuid = (ctypes.c_ubyte * 16)()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceGetUuid_v2(uuid, device)
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        cuda.cuCtxSetCurrent(context)
        address = ctypes.c_uint64()
        if held:
            said["alloc"] = cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(held))
        cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        said["devices"].append({"uuid": bytes(uuid).hex(), "free": free.value, "total": total.value})
    print(json.dumps(said), flush=True)
    if held:
        sys.stdin.read()


if __name__ == "__main__":
    main()
