"""DT-FM's cost of a layout, as published.

Yuan et al. 2022, "Decentralized Training of Foundation Models in Heterogeneous Environments"
(NeurIPS, arXiv 2206.01288), section 3. Devices are partitioned into one group per stage (outer
level); the groups' order and who sends to whom follow exactly (inner level).

    alpha_{d,d'}, beta_{d,d'}   latency_DD (s), rate_DD (bit/s): the mean of both directions
    c_dp, c_pp                  `reduce_DD` (twice the sum of latency and slice), `hop_DD`
    DATAP-COST                  `data_cost`: peers are served one after another
    PIPELINEP-COST              `partition_cost`: bottleneck matchings, then an open path
    total                       DATAP-COST + 2 PIPELINEP-COST, in seconds

Axes: D devices, S stages, R replicas. The released code fixes the sizes for GPT-3 XL
(`CASE_STUDY`), with a typing error (2024 for 2048) and GiB that are taken for GB; they are kept.
"""

from dataclasses import dataclass

import numpy as np

from thinpipe.launch.plan.placement.cluster import Cluster, Floats, Ints
from thinpipe.launch.plan.placement.matching import bottleneck_matching
from thinpipe.launch.plan.placement.paths import open_path
from thinpipe.pipeline.wire.kernels.cpu.compilation import compiled

_GIB = 2**30


@dataclass(frozen=True)
class DtfmSizes:
    """Sizes that DT-FM takes from a workload: GB of gradients that a device exchanges, and GB of
    activations that it passes on, in a step.
    """

    stages: int
    replicas: int
    gradient_gb: float
    activation_gb: float


CASE_STUDY = DtfmSizes(8, 8, 1.3 * 4 * 3 / 24, 2024 * 2048 * 2 * (1.25e5 / 2048) / _GIB)
"""The released case study: GPT-3 XL, three layers per stage, 1.25e5 tokens per pipeline."""


@dataclass(frozen=True, eq=False)
class DtfmCost:
    """The costs of pairs of devices, in seconds: `reduce_DD` between replicas, `hop_DD` between
    stages. Layouts are grids [S, R] of devices.
    """

    stages: int
    replicas: int
    reduce_DD: Floats
    hop_DD: Floats

    @classmethod
    def of(cls, cluster: Cluster, sizes: DtfmSizes) -> "DtfmCost":
        """The costs on these devices.

        Raises:
            ValueError: there are fewer devices than stages x replicas.
        """
        check_enough(cluster, sizes.stages, sizes.replicas)
        gradient_s = sizes.gradient_gb * 8e9 / sizes.replicas / cluster.rate_DD
        activation_s = sizes.activation_gb * 8e9 / cluster.rate_DD
        reduce_DD = 2 * (cluster.latency_DD + gradient_s)
        hop_DD = cluster.latency_DD + activation_s
        return cls(
            sizes.stages, sizes.replicas, (reduce_DD + reduce_DD.T) / 2, (hop_DD + hop_DD.T) / 2
        )

    def data_cost(self, grid_SR: Ints) -> float:
        """Seconds of the slowest group's exchange."""
        return float(group_costs(self.reduce_DD, grid_SR).max())

    def grid_cost(self, grid_SR: Ints) -> float:
        """Of a layout as it stands: its order of stages, and its replicas."""
        hops_s = self.hop_DD[grid_SR[:-1], grid_SR[1:]].max(axis=1, initial=0.0)
        return self.data_cost(grid_SR) + 2 * float(hops_s.sum())

    def arrange(self, groups_SR: Ints) -> tuple[float, Ints]:
        """The cost of a partition into groups, and its best layout: exact up to 12 stages."""
        between_SS = matched_hops(self.hop_DD, groups_SR)
        path_s, order_S = open_path(between_SS)
        grid_SR = groups_SR[order_S].copy()
        for stage in range(1, self.stages):
            hops_RR = self.hop_DD[np.ix_(grid_SR[stage - 1], grid_SR[stage])]
            _, column_R = bottleneck_matching(hops_RR)
            grid_SR[stage] = grid_SR[stage, column_R]
        return self.data_cost(groups_SR) + 2 * path_s, grid_SR


def check_enough(cluster: Cluster, stages: int, replicas: int) -> None:
    """Reject more stages and replicas than there are devices.

    Raises:
        ValueError: naming both.
    """
    if stages * replicas > cluster.devices:
        raise ValueError(
            f"{stages} stages x {replicas} replicas need {stages * replicas} devices, the network "
            f"has {cluster.devices}; use fewer stages or replicas, or add hosts"
        )


@compiled
def group_costs(reduce_DD: Floats, grid_SR: Ints) -> Floats:
    """Seconds that each group's slowest member takes to serve its peers."""
    stages, replicas = grid_SR.shape
    found = np.zeros(stages)
    for stage in range(stages):
        for first in range(replicas):
            total = 0.0
            for second in range(replicas):
                if first != second:
                    total += reduce_DD[grid_SR[stage, first], grid_SR[stage, second]]
            found[stage] = max(found[stage], total)
    return found


@compiled
def matched_hops(hop_DD: Floats, groups_SR: Ints) -> Floats:
    """[S, S]: the worst hop between two groups when they are matched best."""
    stages, replicas = groups_SR.shape
    between_SS = np.zeros((stages, stages))
    hops_RR = np.empty((replicas, replicas))
    for a in range(stages):
        for b in range(a):
            for i in range(replicas):
                for j in range(replicas):
                    hops_RR[i, j] = hop_DD[groups_SR[a, i], groups_SR[b, j]]
            between_SS[a, b] = between_SS[b, a] = bottleneck_matching(hops_RR)[0]
    return between_SS
