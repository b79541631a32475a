"""Arrays as a session knows them: who keeps shards alive, and what is lost stays lost."""

import pytest
from remembering_head import Head

from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.protocol import messages, shardings
from ridgeway.protocol.shardings import Sharding
from ridgeway.protocol.status import Code, data_loss
from ridgeway.proxy.arrays import Array, BufferGroup

KIND_F32 = 11


def sharding(*devices: int) -> Sharding:
    proto = messages.ShardingProto()
    if len(devices) == 1:
        proto.MergeFromString(shardings.single_device_sharding_proto(devices[0]))
    else:
        proto.MergeFromString(shardings.hlo_sharding_proto(devices, b""))
    return shardings.parse(proto)


class Cluster:
    """Three hosts with two devices each; host 0 has devices 0 and 1, and so on."""

    def __init__(self) -> None:
        self.head = Head()
        self.manager = self.head.manager
        self.executors = self.head.hosts()
        self._groups = 0

    def group(self, *executors: ExecutorLink) -> BufferGroup:
        self._groups += 1
        return BufferGroup(self._groups, executors)

    def array(self, *devices: int) -> Array:
        """A bound array; its group lies on the executors of its devices."""
        array = Array(KIND_F32, (8,), sharding(*devices))
        owners = {device // 2: self.executors[device // 2] for device in devices}
        array.bind(self.group(*owners.values()))
        return array

    def freed(self, executor: int) -> list[int]:
        """Groups that an executor was told to forget."""
        link = self.executors[executor]
        link.flush_frees()
        return [group for _, groups in self.head.sent(link, "free") for group in groups]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


# ---- releasing


def test_a_dropped_array_frees_its_shards_everywhere(cluster: Cluster) -> None:
    array = cluster.array(0, 2)
    assert cluster.freed(0) == []
    array.release()
    assert [cluster.freed(executor) for executor in range(3)] == [[1], [1], []]


def test_shards_are_freed_when_the_last_array_that_refers_to_them_is_dropped(cluster: Cluster) -> None:
    one = cluster.array(0, 2)
    assert isinstance(one.groups, BufferGroup)
    other = Array(KIND_F32, (8,), sharding(0))
    other.bind(one.groups)
    one.release()
    assert cluster.freed(0) == []
    other.release()
    assert cluster.freed(0) == [1]


def test_an_array_that_names_a_group_several_times_counts_once(cluster: Cluster) -> None:
    group = cluster.group(cluster.executors[0])
    array = Array(KIND_F32, (8,), sharding(0, 1))
    array.bind((group, group))
    assert group.references == 1
    array.release()
    assert cluster.freed(0) == [1]


def test_dropping_twice_frees_once(cluster: Cluster) -> None:
    array = cluster.array(0)
    array.release()
    array.delete()
    array.release()
    assert cluster.freed(0) == [1]


def test_an_array_that_was_dropped_before_it_was_made_frees_at_once(cluster: Cluster) -> None:
    array = Array(KIND_F32, (8,), sharding(0))
    array.release()
    array.bind(cluster.group(cluster.executors[0]))
    assert cluster.freed(0) == [1]
    assert array.groups is None


def test_a_failed_array_frees_what_it_had(cluster: Cluster) -> None:
    array = cluster.array(0)
    array.fail(data_loss("it was lost"))
    assert cluster.freed(0) == [1]
    assert array.problem(cluster.manager) == data_loss("it was lost")


def test_nothing_is_freed_on_an_executor_that_is_lost(cluster: Cluster) -> None:
    array = cluster.array(0, 2)
    cluster.head.close_executor(cluster.executors[0])
    array.release()
    assert cluster.freed(0) == []
    assert cluster.freed(1) == [1]


# ---- deleting


def test_a_deleted_array_cannot_be_used(cluster: Cluster) -> None:
    array = cluster.array(0)
    assert array.problem(cluster.manager) is None
    assert not array.is_deleted
    array.delete()
    assert array.is_deleted
    problem = array.problem(cluster.manager)
    assert problem is not None
    assert problem.code is Code.INVALID_ARGUMENT
    assert "deleted" in problem.message
    assert cluster.freed(0) == [1]


def test_deleting_reaches_an_array_that_shares_the_shard(cluster: Cluster) -> None:
    one = cluster.array(0, 2)
    assert isinstance(one.groups, BufferGroup)
    part = Array(KIND_F32, (8,), sharding(0))
    part.bind(one.groups)
    rest = Array(KIND_F32, (8,), sharding(2))
    rest.bind(one.groups)
    part.delete()
    assert one.is_deleted
    assert one.problem(cluster.manager) is not None
    assert not rest.is_deleted
    assert rest.problem(cluster.manager) is None


def test_giving_away_leaves_the_shards_to_the_array_that_has_them_now(cluster: Cluster) -> None:
    one = cluster.array(0)
    assert isinstance(one.groups, BufferGroup)
    other = Array(KIND_F32, (8,), sharding(0))
    other.bind(one.groups)
    one.give_away()
    assert one.is_deleted
    assert other.problem(cluster.manager) is None
    other.release()
    assert cluster.freed(0) == [1]


# ---- pins


def test_what_held_work_will_use_outlives_its_release(cluster: Cluster) -> None:
    array = cluster.array(0)
    array.pin()
    array.release()
    assert array.groups is not None
    assert array.problem(cluster.manager) is None
    assert cluster.freed(0) == []
    array.unpin()
    assert array.groups is None
    assert cluster.freed(0) == [1]


def test_what_held_work_will_use_outlives_its_deletion(cluster: Cluster) -> None:
    array = cluster.array(0)
    array.pin()
    array.delete()
    assert array.problem(cluster.manager) is None
    array.unpin()
    assert array.problem(cluster.manager) is not None
    assert cluster.freed(0) == [1]


def test_several_pins_hold_until_the_last(cluster: Cluster) -> None:
    array = cluster.array(0)
    array.pin()
    array.pin()
    array.release()
    array.unpin()
    assert array.groups is not None
    array.unpin()
    assert cluster.freed(0) == [1]


def test_an_unpinned_array_that_the_client_still_has_stays(cluster: Cluster) -> None:
    array = cluster.array(0)
    array.pin()
    array.unpin()
    assert array.groups is not None
    assert cluster.freed(0) == []


def test_an_error_is_not_put_off_by_a_pin(cluster: Cluster) -> None:
    array = cluster.array(0)
    array.pin()
    array.fail(data_loss("it was lost"))
    assert array.problem(cluster.manager) == data_loss("it was lost")
    assert cluster.freed(0) == [1]
    array.unpin()
    assert cluster.freed(0) == [1]


# ---- losses


def test_an_array_with_a_shard_on_a_lost_executor_is_lost_for_good(cluster: Cluster) -> None:
    array = cluster.array(0, 2)
    assert array.problem(cluster.manager) is None
    cluster.head.close_executor(cluster.executors[1], "it was killed")
    problem = array.problem(cluster.manager)
    assert problem is not None
    assert problem.code is Code.DATA_LOSS
    assert "slice 1 host 0" in problem.message
    assert "it was killed" in problem.message
    # Its host comes back, its data do not.
    cluster.head.executor(cluster.executors[1].agent)
    assert array.problem(cluster.manager) == problem
    assert cluster.freed(0) == [1]


def test_a_silent_hosts_arrays_exceeded_the_deadline(cluster: Cluster) -> None:
    array = cluster.array(2)
    cluster.head.now += 0.1
    record = cluster.manager.membership.agents[cluster.executors[1].agent]
    record.heard = cluster.head.now - 60.0
    cluster.manager.tick()
    problem = array.problem(cluster.manager)
    assert problem is not None
    assert problem.code is Code.DEADLINE_EXCEEDED


def test_arrays_on_survivors_live_on(cluster: Cluster) -> None:
    array = cluster.array(0, 4)
    cluster.head.close_executor(cluster.executors[1])
    assert array.problem(cluster.manager) is None
    assert cluster.freed(0) == []


def test_an_array_is_not_lost_with_shards_of_its_group_that_are_not_its_own(cluster: Cluster) -> None:
    whole = cluster.array(0, 2)
    assert isinstance(whole.groups, BufferGroup)
    part = Array(KIND_F32, (8,), sharding(0))
    part.bind(whole.groups)
    cluster.head.close_executor(cluster.executors[1])
    assert whole.problem(cluster.manager) is not None
    assert part.problem(cluster.manager) is None
    part.release()
    assert cluster.freed(0) == [1]


def test_an_array_of_several_groups_is_lost_with_any_of_them(cluster: Cluster) -> None:
    array = Array(KIND_F32, (8,), sharding(0, 2))
    array.bind((cluster.group(cluster.executors[0]), cluster.group(cluster.executors[1])))
    assert [e.number for _, e in array.executors(cluster.manager)] == [e.number for e in cluster.executors[:2]]
    cluster.head.close_executor(cluster.executors[1])
    assert array.problem(cluster.manager) is not None
    assert cluster.freed(0) == [1]


def test_the_first_cause_is_kept(cluster: Cluster) -> None:
    array = cluster.array(0, 2)
    cluster.head.close_executor(cluster.executors[1], "the first cause")
    problem = array.problem(cluster.manager)
    cluster.head.close_executor(cluster.executors[0], "the second cause")
    assert array.problem(cluster.manager) == problem
    assert problem is not None
    assert "the first cause" in problem.message
