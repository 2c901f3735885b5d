"""The benchmark behind ``kvstore bench``: the store, its peers and raw limits, in one run.

Absolute figures of one machine drift within minutes, so nothing here compares figures of two runs.
Every contender of a section runs once a round, rounds are repeated, and what is reported is the
median over rounds of the ratio between two contenders of the same round. Every contender's bytes
are compared with the source once, outside the timed part: one that is fast by being wrong fails.

Modules: ``workload`` (what is stored and loaded), ``scratch`` (files and the page cache),
``timing`` (rounds, medians, ratios), ``machine`` (what it ran on), ``limits`` (what the hardware
and the kernel allow), ``peers_zarr``, ``peers_files``, ``peer_vllm`` (other software), ``loads``,
``stores``, ``lookups`` (this library), ``floors`` (what is promised), ``suite`` (one whole run),
``report`` (the table).
"""

from __future__ import annotations
