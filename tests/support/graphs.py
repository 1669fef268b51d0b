"""Graphs: a torch.compile backend that runs graphs as they are."""

import torch


class Graphs:
    """Counts the graphs that it is given."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.count = 0

    def __call__(self, graph, example_inputs):
        self.count += 1
        return graph.forward
