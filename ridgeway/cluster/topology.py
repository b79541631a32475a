"""The fixed shape of a cluster: slices x hosts per slice x devices per host, and the numbers that follow from it."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """Device ids are ``(slice * hosts_per_slice + host) * devices_per_host + k`` for the life of the cluster; a
    replacement host gets its predecessor's.  A *slot* is a host's place, ``slice * hosts_per_slice + host``."""

    slices: int
    hosts_per_slice: int
    devices_per_host: int

    def __post_init__(self) -> None:
        for name in ("slices", "hosts_per_slice", "devices_per_host"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a topology is three positive integers, as 3x1x2")

    @property
    def slots(self) -> int:
        """Number of hosts."""
        return self.slices * self.hosts_per_slice

    @property
    def devices(self) -> int:
        """Number of devices in the cluster."""
        return self.slots * self.devices_per_host

    def slot_of(self, slice_index: int, host_index: int) -> int:
        """The place of a host.

        Raises:
          ValueError: there is no such slice or host in this topology.
        """
        if not 0 <= slice_index < self.slices or not 0 <= host_index < self.hosts_per_slice:
            raise ValueError(
                f"there is no slice {slice_index} host {host_index} in a cluster of {self}; "
                f"slices are 0..{self.slices - 1}, hosts 0..{self.hosts_per_slice - 1}"
            )
        return slice_index * self.hosts_per_slice + host_index

    def slice_of_slot(self, slot: int) -> int:
        """Index of the slice that a slot belongs to."""
        return slot // self.hosts_per_slice

    def host_of_slot(self, slot: int) -> int:
        """Index of a slot's host within its slice."""
        return slot % self.hosts_per_slice

    def slots_of_slice(self, slice_index: int) -> range:
        """The slots of one slice."""
        return range(slice_index * self.hosts_per_slice, (slice_index + 1) * self.hosts_per_slice)

    def slot_of_device(self, device: int) -> int:
        """The slot of the host that has a device."""
        return device // self.devices_per_host

    def slice_of_device(self, device: int) -> int:
        """The slice that has a device."""
        return device // (self.devices_per_host * self.hosts_per_slice)

    def first_device(self, slot: int) -> int:
        """The lowest device id of a host."""
        return slot * self.devices_per_host

    def describe_slot(self, slot: int) -> str:
        """``slice 2 host 0``, for messages."""
        return f"slice {self.slice_of_slot(slot)} host {self.host_of_slot(slot)}"

    def __str__(self) -> str:
        return f"{self.slices}x{self.hosts_per_slice}x{self.devices_per_host}"
