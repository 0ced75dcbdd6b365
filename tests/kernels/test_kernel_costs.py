"""Every kernel that a forward of the GPU's trunk launches is counted: a launch whose bytes nobody
knows would be missing from the roofline. Launches are held back, so nothing is computed."""

import pytest
import torch

pytest.importorskip("triton")

from compile_for import launch_choice, launch_sampling, launch_trunk
from triton_inputs import Random

from civetta.bench.kernel_profile import launches_of
from civetta.kernels.matmul.product import product_kernel
from civetta.kernels.matmul.triton import counters, product
from civetta.kernels.packed import pack

KIND = type(product_kernel)


@pytest.fixture
def held_back(monkeypatch):
    monkeypatch.setattr(KIND, "run", lambda *_, **__: None)
    monkeypatch.setattr(torch, "empty", torch.zeros)  # no index made of garbage


@pytest.mark.usefixtures("held_back")
def test_every_launch_of_a_forward_has_a_cost():
    with launches_of(KIND) as launches:
        launch_trunk("q4_k_xl", torch.float16)
        launch_choice()
        launch_sampling()
    names = {launch.kernel for launch in launches}
    assert {
        "product_kernel",
        "mix_kernel",
        "attend_kernel",
        "walk_kernel",
        "select_kernel",
    } <= names
    unknown = {launch.kernel for launch in launches if launch.cost is None}
    assert not unknown
    assert all(launch.cost.nbytes >= 0 for launch in launches)


@pytest.mark.usefixtures("held_back")
def test_a_product_moves_its_planes_its_rows_and_its_results_once():
    random, rows = Random(1), 5
    w = pack(random.stored("Q8_0", 128, 256), torch.float16, "cpu")
    x, y = random.normal(rows, 256, dtype=torch.float16), torch.zeros(rows, 128)
    with launches_of(KIND) as launches:
        product(x, w, y, counters(torch.device("cpu")))
    (launch,) = launches
    assert launch.cost.nbytes == 128 * 256 * 34 / 32 + rows * (256 * 2 + 128 * 4)
    assert launch.cost.flop == 2 * rows * 128 * 256
    assert "256 -> 128" in launch.cost.detail
