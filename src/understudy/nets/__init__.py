"""Networks: random feature extractors and the classifiers that judge a synthetic set.

Their weights come from a seed alone (`draw`): public randomness, never the private kind.
"""

from __future__ import annotations

from understudy.nets.classifiers import NETWORKS, build
from understudy.nets.convnet import ConvNet, random_convnet
from understudy.nets.draw import draw_parameters, uniforms

__all__ = ["NETWORKS", "ConvNet", "build", "draw_parameters", "random_convnet", "uniforms"]
