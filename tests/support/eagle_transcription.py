"""EAGLE's network and tree, transcribed from the papers without any cache."""

import torch

from recserve.drafters.eagle.network import Eagle
from recserve.drafters.shared.noisy import LEAST_SCALE
from recserve.models.attention import DenseAttention, Rope
from recserve.models.decoder import FINAL_LAYER


def target_states(model, tokens: list[int], layers) -> torch.Tensor:
    """Returns [n, F] states of the target, one full forward, layer by layer."""
    decoder, attend = model.decoder, DenseAttention()
    x = model.tokens(torch.tensor([tokens]))
    rope = Rope(torch.arange(len(tokens))[None], decoder._frequencies, x.dtype)
    found = {0: x}
    for number, layer in enumerate(decoder.layers):
        normed = layer.attention_norm(x)
        x = found[number + 1] = sum(layer(normed, x, rope, number, attend))
    found[FINAL_LAYER] = decoder.norm(x)
    return torch.cat([found[n] for n in layers], dim=-1)[0]


def rms(x, norm):
    return x * (x.pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight


def rotate(x, network: Eagle):
    """Rotates x [n, H, D] at the positions 0..n-1."""
    angles = torch.arange(len(x))[:, None].float() * network._frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def plain_layer(network, layer, inputs, residual, mask=None) -> torch.Tensor:
    """A decoder layer at the positions 0..n-1, with plain causal attention or a mask [n, n]."""
    c = network.config.decoder
    query, key, value = layer.qkv(inputs).split(
        [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim], -1
    )
    query, key, value = (x.view(len(x), -1, c.head_dim) for x in (query, key, value))
    if c.qk_norm:
        query, key = rms(query, layer.q_norm), rms(key, layer.k_norm)
    group = c.num_heads // c.num_kv_heads
    key, value = rotate(key, network).repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->hnm", rotate(query, network), key) * c.head_dim**-0.5
    causal = torch.ones(len(inputs), len(inputs)).tril().bool()
    weights = scores.masked_fill(~(causal if mask is None else mask), float("-inf")).softmax(-1)
    mixed = torch.einsum("hnm,mhd->nhd", weights, value).flatten(1)
    x = residual + layer.output(mixed)
    gate, up = layer.gate_up(rms(x, layer.mlp_norm)).chunk(2, dim=-1)
    x = x + layer.down(torch.nn.functional.silu(gate) * up)
    return x


def eagle_outputs(network: Eagle, features, embedded) -> torch.Tensor:
    """Returns the outputs [n, E] of rows 0..n-1: the paper's layer with plain causal attention."""
    config, layer = network.config, network.layers[0]
    if config.fused:
        normed = rms(features, network.feature_norm)
        inputs = torch.cat([rms(embedded, network.input_norms[0]), normed], dim=-1)
        residual = normed if config.norm_before_residual else features
    else:
        residual = inputs = network.fc(torch.cat([embedded, features], dim=-1))
    x = plain_layer(network, layer, inputs, residual)
    return rms(x, network.norm) if config.norm_output else x


class PlainEagle:
    """EAGLE-2's algorithm, with everything computed again for every node."""

    def __init__(self, drafter, model, tokens):
        self.drafter, self.model, self.network = drafter, model, drafter.network
        states = target_states(model, tokens, drafter.hidden_layers)[:-1]
        self.features = self.first(states)
        self.embedded = model.tokens(torch.tensor(tokens[1:]))

    def first(self, states):
        """Returns the features of the target's states."""
        return self.network.features(states)

    def run(self, features, embedded):
        """Returns the outputs of all rows."""
        return eagle_outputs(self.network, features, embedded)

    def children(self, path):
        """Returns (token, log-probability) of the best children of a path of draft tokens."""
        features, embedded = self.features, self.embedded
        output = self.run(features, embedded)[-1:]
        for token in path:
            features = torch.cat([features, output])
            embedded = torch.cat([embedded, self.model.tokens(torch.tensor([token]))])
            output = self.run(features, embedded)[-1:]
        config = self.network.config
        if config.fused:
            read = output if config.norm_output else rms(output, self.network.norm)
            logits = self.network.head(read)
        else:
            logits = self.model.logits(output)
        best = (logits[0] / LEAST_SCALE).log_softmax(-1).topk(self.drafter.width)
        tokens = best.indices.tolist()
        if self.network.token_map is not None:
            tokens = self.network.token_map[best.indices].tolist()
        return list(zip(tokens, best.values.tolist(), strict=True))

    def tree(self, depth, num_nodes):
        """Returns the paths of the tree's nodes."""
        found, frontier = {}, [((), 0.0)]
        for _ in range(depth):
            level = [
                ((*path, token), score + own)
                for path, score in frontier
                for token, own in self.children(path)
            ]
            found.update(level)
            frontier = sorted(level, key=lambda node: -node[1])[: self.drafter.width]
        return set(sorted(found, key=lambda path: -found[path])[:num_nodes])


def paths_of(draft) -> set[tuple[int, ...]]:
    """Returns the path of every node of a draft."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    assert draft.depth == max(map(len, paths))
    return set(paths)


def record_drafts(drafter) -> list:
    """Notes tokens, budget and draft of every proposal."""
    notes, propose = [], drafter.propose

    def noted(contexts, budgets):
        drafts = propose(contexts, budgets)
        for context, budget, draft in zip(contexts, budgets, drafts, strict=True):
            notes.append((list(context.tokens), budget, draft))
        return drafts

    drafter.propose = noted
    return notes


def assert_as_transcribed(notes, drafter, model, least: int, plain=PlainEagle) -> None:
    filled = [note for note in notes if len(note[2])]
    assert len(filled) >= least
    for tokens, budget, draft in filled:
        depth = min(budget.depth, drafter.depth)
        expected = plain(drafter, model, tokens).tree(
            depth, min(budget.num_nodes, drafter.num_nodes)
        )
        assert paths_of(draft) == expected
