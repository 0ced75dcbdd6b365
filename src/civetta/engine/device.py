"""What the engine asks of the device itself: the memory taken, and whether it can still compute."""

from __future__ import annotations


def device_bytes(device: str) -> int:
    """Bytes that this process's tensors take on a GPU; 0 on a CPU. Asks the allocator alone."""
    if not _is_gpu(device):
        return 0
    import torch

    return int(torch.cuda.memory_allocated(device))


def device_fault(device: str) -> str | None:
    """Why the device cannot compute any more, in the driver's words; None while it can.

    A GPU's fault stays with the process: after it every call fails. So this waits for the work that
    was given to the device, and looks whether that fails too. For the step thread, after a fault.
    """
    if not _is_gpu(device):
        return None
    import torch

    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def _is_gpu(device: str) -> bool:
    return device.startswith("cuda")
