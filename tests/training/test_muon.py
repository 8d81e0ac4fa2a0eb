import torch
from torch import nn

from specdemo.training.fit import Muon, orthogonal


def test_the_update_is_nearly_orthogonal() -> None:
    torch.manual_seed(0)
    for shape in ((12, 40), (40, 12), (16, 16)):
        singular = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert float(singular.min()) > 0.3 and float(singular.max()) < 1.3


def test_steps_are_those_of_torch() -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(24, 8)), nn.Parameter(torch.randn(8, 24))]
    reference = [nn.Parameter(p.detach().clone()) for p in parameters]
    a = Muon(parameters, lr=0.02, weight_decay=0.1, momentum=0.95)
    b = torch.optim.Muon(reference, lr=0.02, weight_decay=0.1, momentum=0.95)
    for _ in range(4):
        for mine, other in zip(parameters, reference, strict=True):
            mine.grad = torch.randn(mine.shape)
            other.grad = mine.grad.clone()
        a.step()
        b.step()
    for mine, other in zip(parameters, reference, strict=True):
        torch.testing.assert_close(mine, other, atol=3e-3, rtol=3e-2)  # torch's Muon multiplies in bf16
