"""What a CUDA device asks of its kernels, and the Triton kernels that answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, final

from transfer._cuda_api import CudaMissing

if TYPE_CHECKING:
    from transfer._cuda_api import Driver


class Kernels(Protocol):
    """What the device asks of its kernels.

    Attributes:
        movers: programs that move bytes, by (bytes of an element, large tiles).
    """

    movers: dict[tuple[int, bool], Any]

    def load(self, program: Any) -> None:
        """Get a program ready."""
        ...

    def launch(self, stream: Any, units: int, program: Any, items: int, *args: int) -> None:
        """Queue a program."""
        ...

    def lend(self, stream: Any) -> object:
        """A stream of ours as the callable of a `Launch` wants it."""
        ...


@final
class TritonKernels:
    """The Triton kernels on one GPU.

    Raises:
        CudaMissing: no Triton, or a torch without CUDA.
    """

    def __init__(self, driver: Driver) -> None:
        try:
            import torch  # noqa: PLC0415 - import torch costs a second; a device needs it, a pool not

            from transfer.kernels import MOVERS, Programs  # noqa: PLC0415 - Triton is optional
        except ImportError as error:
            raise CudaMissing(f"found no usable Triton ({error}), need triton 3.6") from error
        if torch.version.cuda is None:
            raise CudaMissing(
                f"found torch {torch.__version__} without CUDA, need a torch built for CUDA 13"
            )
        self._torch = torch
        self._ordinal = driver.ordinal
        major = driver.attribute("COMPUTE_CAPABILITY_MAJOR")
        minor = driver.attribute("COMPUTE_CAPABILITY_MINOR")
        self._programs = Programs(major * 10 + minor)
        self.movers = MOVERS
        for program in MOVERS.values():
            self.load(program)

    def load(self, program: Any) -> None:
        """See `Kernels.load`."""
        with self._torch.cuda.device(self._ordinal):
            self._programs.load(program)

    def launch(self, stream: Any, units: int, program: Any, items: int, *args: int) -> None:
        """See `Kernels.launch`."""
        self._programs.launch(int(stream), units, program, items, *args)

    def lend(self, stream: Any) -> object:
        """See `Kernels.lend`."""
        make: Any = self._torch.cuda.ExternalStream
        stream_of: object = make(int(stream), device=self._ordinal)
        return stream_of
