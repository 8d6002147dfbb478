"""A mixture of experts: what it holds in memory against what it computes with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a model.  Rows are assumed to be spread evenly over them.

    Attributes:
        layers: Layers with experts.
        experts: Experts of such a layer, without shared ones, which every token passes.
        experts_per_token: Experts that a token passes in such a layer.
        parameters: Parameters of the model, all of which are held in memory.
        active_parameters: Parameters that a token is multiplied with: without the experts that it does not pass.
        expert_parameters: Parameters of all experts.
        rows_per_expert: Rows of a batch that each expert gets if they are spread evenly; None if samples are not text.
    """

    layers: int
    experts: int
    experts_per_token: int
    parameters: int
    active_parameters: int
    expert_parameters: int
    rows_per_expert: float | None
