"""The language model of a server stays when its bundle is replaced."""

from __future__ import annotations

from recserve.bundle.bundle import Bundle
from recserve.config import ServerConfig
from recserve.schemas.items import RecommendRequest
from recserve.schemas.text import CompletionRequest
from recserve.server.loader import ServiceLoader
from recserve.service import Service
from recserve.service.replacement import hand_over
from tests.support.bundle_shelf import shelf
from tests.support.paths import reference


def text_of(service: Service) -> str:
    request = CompletionRequest(prompt="Once upon a time", max_tokens=12, temperature=0)
    work = service.text.begin_completion(request, "r", None, lambda piece: None)
    for future in work.futures:
        future.result()
    return work.wait().choices[0].text


def test_text_and_drafters_survive_a_replacement(tmp_path):
    bundles = shelf(tmp_path)
    loader = ServiceLoader(
        ServerConfig(
            bundle=bundles / "one",
            bundles_dir=bundles,
            llm=reference("stories260k"),
            drafters=("ngram",),
            device="cpu",
            kv_bytes=2**24,
        )
    )
    old = loader.first()
    before = text_of(old)
    new = loader.successor(old, Bundle.open(bundles / "two"))
    try:
        assert new.text.model.default_drafter == "ngram"
        assert new.text.model.drafters["ngram"] is not old.text.model.drafters["ngram"]
        hand_over(old, new, lambda: None)
        assert text_of(old) == text_of(new) == before
        old.close()
        assert text_of(new) == before
        assert new.recommend(RecommendRequest(history=["item000001"], k=3)).items
    finally:
        new.close()
