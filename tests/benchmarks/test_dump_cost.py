"""The dump's cost in messages, bytes and identical values; never in seconds, which a busy machine decides."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from slime_instrument._dump.zigzag import shard_lengths
from slime_instrument.lab._sources import find_sources

Run = Callable[..., Any]
SMALL = ("--repeats", "1", "--own-rendering")


def case(cp: int, dp: int, samples: int, response: int, fields: int) -> tuple[str, ...]:
    numbers = {"--cp": cp, "--dp": dp, "--samples": samples, "--response": response, "--fields": fields}
    return tuple(text for name, value in numbers.items() for text in (name, str(value)))


@pytest.fixture(scope="module")
def small(run_json: Run) -> Any:
    return run_json("dump_cost", *case(2, 2, 6, 40, 3), *SMALL)


def test_both_ways_write_the_same_samples(small: Any) -> None:
    assert small["bit_identical"] is True
    assert small["baseline"].startswith("rendering of slime's way")


def test_the_promised_keys_are_there(small: Any) -> None:
    assert {"ratio_total", "ratio_restore", "rss_growth_over_file", "collectives", "baseline"} <= small.keys()
    assert small["ratio_total"] > 0
    assert small["ratio_restore"] > 0


def test_slimes_way_takes_a_collective_per_sample_and_field(small: Any) -> None:
    assert small["collectives_baseline"] == 6 * 3 + 1  # and one gather


def test_ours_uses_no_collective_and_one_connection_whatever_the_samples_and_fields(run_json: Run, small: Any) -> None:
    larger = run_json("dump_cost", *case(2, 2, 24, 40, 8), *SMALL)
    for outcome in (small, larger):
        assert outcome["collectives_by_rank"] == [0, 0, 0, 0]
        assert outcome["connections_by_rank"] == [0, 1, 1, 1]


def test_pieces_grow_with_fields_and_dtypes_and_not_with_samples(run_json: Run, small: Any) -> None:
    more_samples = run_json("dump_cost", *case(2, 2, 24, 40, 3), *SMALL)
    assert more_samples["pieces_by_rank"] == small["pieces_by_rank"]
    # The description and one for each field; the rank with everything of its data-parallel rank also the common ones.
    assert small["pieces_by_rank"][0] == 0
    assert small["pieces_by_rank"][1] == small["pieces_by_rank"][3] == 1 + 3


def test_pieces_grow_with_bytes_over_bucket_and_each_byte_is_sent_once(run_json: Run) -> None:
    samples, response, fields, bucket = 10, 50, 4, 1024
    outcome = run_json(
        "dump_cost", *case(2, 1, samples, response, fields), *SMALL, SLIME_INSTRUMENT_BUCKET_MB=str(bucket / (1 << 20))
    )
    responses = [response - sample % 5 for sample in range(samples)]
    totals = [length + 64 + sample % 7 for sample, length in enumerate(responses)]
    shard = 4 * fields * sum(shard_lengths(totals, responses, 2, 1))
    # Pieces are cut at samples where they can be, so that a bucket need not be full.
    assert 1 + ceil(shard / bucket) <= outcome["pieces_by_rank"][1] <= 1 + 2 * ceil(shard / bucket) + fields
    assert outcome["bytes_sent_by_rank"][0] == 0
    manifest = outcome["bytes_sent_by_rank"][1] - shard
    assert 0 < manifest < 3000
    assert outcome["bit_identical"] is True


def test_four_way_context_parallel_shards_come_together(run_json: Run) -> None:
    assert run_json("dump_cost", *case(4, 1, 5, 30, 8), *SMALL)["bit_identical"] is True


@pytest.mark.real_slime
def test_slimes_own_code_is_the_baseline_where_a_checkout_is_there(run_json: Run) -> None:
    if not any(Path(source).name == "681b3adca" for source in find_sources()):
        pytest.skip("no checkout of 681b3adca")
    pytest.importorskip("megatron.core")
    outcome = run_json("dump_cost", *case(2, 2, 6, 40, 8), "--repeats", "1")
    assert outcome["baseline"] == "slime 681b3adca, its own code"
    assert outcome["groups"] == "megatron-core"
    assert outcome["bit_identical"] is True
    assert outcome["collectives_baseline"] == 6 * 8 + 1
