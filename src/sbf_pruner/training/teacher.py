"""Distillation: the dense network, as its own stage left it, teaches what is left of it.

A frozen network, the weight of its opinion and a temperature enter; a loss leaves that mixes the labels'
with the divergence from the teacher's soft answers.  The teacher sees the very images the student sees.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Teacher:
    """A network that is only listened to: in evaluation mode, without gradients."""

    def __init__(self, network: nn.Module, alpha: float, temperature: float, *, mirrored: bool = False) -> None:
        self.network, self.temperature, self.mirrored = network, temperature, mirrored
        device = next((parameter.device for parameter in network.parameters()), None)
        # Filled in place as it fades: a captured step sees that.
        self.alpha = torch.tensor(alpha, device=device)

    def answers(self, images: Tensor) -> Tensor:
        """The teacher's logits; where it looks at mirror images too, the mean of both.

        >>> Teacher(nn.Flatten(), 0.5, 4.0, mirrored=True).answers(torch.tensor([[[[1.0, 3.0]]]]))
        tensor([[2., 2.]])
        """
        seen = torch.cat([images, images.flip(-1)]) if self.mirrored else images
        with torch.no_grad():
            outputs = self.network(seen)
        assert isinstance(outputs, Tensor)
        outputs = outputs.float()
        return outputs.unflatten(0, (2, -1)).mean(0) if self.mirrored else outputs

    def mixed(self, loss: Tensor, outputs: Tensor, answers: Tensor) -> Tensor:
        """`(1 - alpha) loss + alpha T^2 KL(teacher || student)`; T^2 keeps the gradient's size as T grows.

        >>> same = torch.tensor([[1.0, 2.0]])
        >>> Teacher(nn.Identity(), 0.5, 4.0).mixed(torch.tensor(3.0), same, same)
        tensor(1.5000)
        """
        student, teacher = (F.log_softmax(logits / self.temperature, 1) for logits in (outputs, answers))
        divergence = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        return (1 - self.alpha) * loss + self.alpha * self.temperature**2 * divergence
