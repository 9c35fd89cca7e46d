"""`Scale`: the number of replicas of a server, and the resources of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """The least and greatest number of replicas, and the CPUs and GPUs of each (None: Ray's default).

    Raises ValueError unless 1 <= least <= most.
    """

    least: int = 1
    most: int = 1
    cpus: float | None = None
    gpus: float | None = None

    @staticmethod
    def read(replicas: str | int, cpus: float | None = None, gpus: float | None = None) -> Scale:
        """Parse "4" (4 replicas) or "1..4" (1 to 4). Raises ValueError for anything else."""
        least, dots, most = str(replicas).partition("..")
        try:
            return Scale(int(least), int(most if dots else least), cpus, gpus)
        except ValueError:
            raise ValueError(
                f"replicas={replicas!r} is not possible: write 4, or 1..4 for as many as it takes."
            ) from None

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(
                f"{self.least}..{self.most} replicas are not possible: 1 is the least, and then as many or more."
            )

    @property
    def resources(self) -> dict[str, float]:
        """The resources that Ray reserves for a replica, by Ray's names."""
        return {name: value for name, value in (("num_cpus", self.cpus), ("num_gpus", self.gpus)) if value is not None}
