"""The test kit: a device that moves bytes when told, faults by plan, pools that show damage.

Everything here is deterministic by seed and made to be used by programs that embed kvhold, too:
``Engine(FaultyDevice(HostDevice(), FaultPlan(seed=7)))`` is a program's own fault-injection test.
"""

from transfer.testing._bugs import SEEDED_BUGS
from transfer.testing._calls import FaultyCalls, Gate
from transfer.testing._conformance import DeviceFault, Subject, check_device
from transfer.testing._explore import (
    SCENES,
    Act,
    Exploration,
    InvariantBroken,
    Plan,
    Step,
    explore,
)
from transfer.testing._faulty import FaultyDevice, InjectedFault
from transfer.testing._invariants import broken_invariants
from transfer.testing._memory import KeptStorage, SimPool, SimStorage, memory_at, peek, poke
from transfer.testing._naive import NaiveEngine
from transfer.testing._plan import CALL_FAULTS, Fault, FaultPlan
from transfer.testing._poison import POISON, Damage, PoisonDamaged, PoisonedPool
from transfer.testing._sim import SimDevice
from transfer.testing._stream import SimEvent, SimFence, SimStream

__all__ = [
    "CALL_FAULTS",
    "POISON",
    "SCENES",
    "SEEDED_BUGS",
    "Act",
    "Damage",
    "DeviceFault",
    "Exploration",
    "Fault",
    "FaultPlan",
    "FaultyCalls",
    "FaultyDevice",
    "Gate",
    "InjectedFault",
    "InvariantBroken",
    "KeptStorage",
    "NaiveEngine",
    "Plan",
    "PoisonDamaged",
    "PoisonedPool",
    "SimDevice",
    "SimEvent",
    "SimFence",
    "SimPool",
    "SimStorage",
    "SimStream",
    "Step",
    "Subject",
    "broken_invariants",
    "check_device",
    "explore",
    "memory_at",
    "peek",
    "poke",
]
