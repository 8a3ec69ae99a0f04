"""A declared migration against timm's own conversion of OpenAI's CLIP."""

import pytest

from modkit import migrations as mig
from tests.unit.migrations.networks import equal
from tests.unit.migrations.real_cases import openai_clip


vision_transformer = pytest.importorskip("timm.models.vision_transformer")


def test_the_image_tower_of_clip():
    """The declared steps return what timm's function returns, bitwise."""
    case = openai_clip()

    expected = vision_transformer._convert_openai_clip(dict(case.old), case.model)

    assert equal(mig.migrate(case.model, case.old), expected)
    assert equal(mig.migrate(case.model, dict(case.old)), expected)
