"""Every rank's part reaches the writer, each byte once; what goes wrong leaves nobody waiting."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime_instrument._dump.agreement import Agreement, NotAgreed
from slime_instrument._dump.exchange import Announcement, message_bytes, own_shard, receive_all, send_own
from slime_instrument._dump.payload import build_payload
from slime_instrument._dump.shard import contribute

from .ranks import sharded, topology
from .threads import Mail, QueueTransport, together

FIELDS = ("log_probs", "values")
CPU = torch.device("cpu")


def rollout(dp: int) -> list[dict[str, Any]]:
    """Uneven shards, rank 1 with one sample, rank 2 with none."""
    sizes = [3, 1, 0][:dp]
    data, position = [], 0
    for rank, size in enumerate(sizes):
        totals = [7 + 3 * i + rank for i in range(size)]
        responses = [(5 * i + rank) % 6 for i in range(size)]
        data.append(
            {
                "total_lengths": totals,
                "response_lengths": responses,
                "partition": [sum(sizes) - 1 - position - i for i in range(size)],
                "tokens": [torch.arange(total) + 100 * rank for total in totals],
                "log_probs": [torch.randn(response) for response in responses],
                "values": [torch.randn(response).bfloat16() for response in responses],
            }
        )
        position += size
    return data


class Job:
    """All ranks of one dump as threads."""

    def __init__(self, cp: int, dp: int, bucket: int = 64, timeout_s: float = 5.0) -> None:
        self.data = rollout(dp)
        self.cp, self.dp, self.bucket, self.timeout_s = cp, dp, bucket, timeout_s
        self.store, self.mail = dist.HashStore(), Mail()
        self.transports: dict[int, QueueTransport] = {}
        self.failing: dict[int, int] = {}
        self.absent: set[int] = set()

    def rank(self, dp_rank: int, cp_rank: int) -> Any:
        place = topology(self.cp, cp_rank, self.dp, dp_rank)

        def work() -> Any:
            if place.rank in self.absent:
                return None
            data = sharded(self.data[dp_rank], self.cp, cp_rank, FIELDS)
            contribution = contribute(data, place, FIELDS, provenance={"dp": dp_rank})
            agreement = Agreement(self.store, "0/0", place.rank, place.participants, self.timeout_s)
            transport = QueueTransport(self.mail, place.rank, self.timeout_s, self.failing.get(place.rank))
            self.transports[place.rank] = transport
            if place.is_writer:
                return receive_all(contribution, place, agreement, transport, FIELDS)
            return send_own(contribution, place, agreement, transport, self.bucket)

        return work

    def run(self) -> list[Any]:
        return together([self.rank(dp_rank, cp_rank) for dp_rank in range(self.dp) for cp_rank in range(self.cp)])


def check(job: Job, shards: Any) -> None:
    payload = build_payload(shards, rollout_id=0, writer_rank=0)
    wanted = {
        position: (data["tokens"][i], data["log_probs"][i], data["values"][i])
        for data in job.data
        for i, position in enumerate(data["partition"])
    }
    assert [sample["rollout_position"] for sample in payload["samples"]] == sorted(wanted)
    for sample in payload["samples"]:
        tokens, log_probs, values = wanted[sample["rollout_position"]]
        assert torch.equal(sample["tokens"], tokens)
        assert torch.equal(sample["log_probs"], log_probs)
        assert torch.equal(sample["values"], values)
    assert [layout["provenance"]["dp"] for layout in payload["dp_shards"]] == list(range(job.dp))


@pytest.mark.parametrize("bucket", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize(("cp", "dp"), [(1, 2), (2, 1), (2, 2), (3, 2), (2, 3)])
def test_the_writer_has_the_whole_rollout_and_the_others_sent_their_part_once(cp: int, dp: int, bucket: int) -> None:
    job = Job(cp, dp, bucket)
    writer, *others = job.run()
    assert others == [None] * (cp * dp - 1)
    check(job, writer)
    assert job.mail.left() == 0
    assert job.transports[0].bytes_sent == 0


def test_a_single_rank_sends_nothing() -> None:
    data = rollout(1)[0]
    place = topology()
    (shard,) = own_shard(contribute(data, place, FIELDS), place, FIELDS)
    assert all(torch.equal(a, b) for a, b in zip(shard.rollout_data["log_probs"], data["log_probs"], strict=True))


@pytest.mark.parametrize("who", [0, 1, 3])
def test_a_rank_that_never_comes_makes_all_others_give_up_in_time(who: int) -> None:
    job = Job(2, 2, timeout_s=0.3)
    job.absent.add(who)
    results = job.run()
    assert all(isinstance(result, NotAgreed) for rank, result in enumerate(results) if rank != who)
    assert job.mail.left() == 0  # nobody had begun to send


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_sender_whose_link_breaks_is_waited_for_a_bounded_time(after: int) -> None:
    job = Job(2, 2, bucket=16, timeout_s=0.3)
    job.failing[2] = after
    results = job.run()
    assert isinstance(results[2], ConnectionError)
    assert isinstance(results[0], Exception)


@pytest.mark.parametrize("what", ["manifest", "own part", "payload"])
def test_a_writer_that_fails_after_the_start_still_takes_everything_so_that_nobody_is_left_sending(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    import slime_instrument._dump.exchange as exchange

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("on the writer")

    name = {"manifest": "take_manifest", "own part": "take_own", "payload": "take_payload"}[what]
    monkeypatch.setattr(exchange._Assembling, name, fail)
    job = Job(2, 2, bucket=16)
    writer, *others = job.run()
    assert isinstance(writer, MemoryError)
    assert others == [None] * 3
    assert job.mail.left() == 0


def test_an_announcement_survives_its_way_and_says_which_messages_follow() -> None:
    sizes = Announcement(manifest=10, payload=25, message=8)
    assert Announcement.decode(sizes.encode()) == sizes
    assert sizes.messages() == [8, 8, 8, 1]
    assert Announcement(10, 24, 8).messages() == [8, 8, 8]
    assert Announcement(10, 0, 1).messages() == []


@pytest.mark.parametrize(("payload", "bucket"), [(0, 100), (1, 1), (10**9, 64 << 20), (5, 100)])
def test_a_message_is_never_empty_and_never_above_the_bucket(payload: int, bucket: int) -> None:
    assert 1 <= message_bytes(payload, bucket, CPU) <= max(bucket, 1)


def test_a_manifest_is_plain_data() -> None:
    manifest = contribute(rollout(1)[0], topology(), FIELDS).manifest
    assert pickle.loads(pickle.dumps(manifest)) == manifest
