"""What is known of VMs that are not there."""

from fluster_bus.messages import VMTrouble, WorkerId
from fluster_services.controller.state.reports import VMTroubles

A, B = WorkerId("a"), WorkerId("b")


def test_it_counts_until_it_is_over_is_taken_back_or_its_worker_works() -> None:
    now = 0.0
    troubles = VMTroubles(lambda: now)
    troubles.hear(VMTrouble(vm_id=B, trouble="no room", counts_for_s=10))
    troubles.hear(VMTrouble(vm_id=A, trouble="no engine", counts_for_s=20))
    assert troubles.told(()) == [(A, "no engine"), (B, "no room")]
    assert troubles.told({A}) == [(B, "no room")]
    now = 10.0
    assert troubles.told(()) == [(A, "no engine")]
    troubles.hear(VMTrouble(vm_id=A))
    assert troubles.told(()) == []
