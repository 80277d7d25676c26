"""Makes the folders beside it: small random encoders, with transformers' results in float64.

pip install torch transformers==5.24.0
python make.py FOLDER
"""

import json
import sys
import zlib
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORDS = ["the", "sea", "was", "calm", "no", "##body", "##s", "a", "word", "said", ",", "."]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXTS = ["the sea was calm, nobody said a word.", "a sea", "words said the sea " * 4]
QUERY, DOCUMENTS = "the sea", ["the sea was calm", "nobody said a word .", "a sea"]
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 66,
}


def wordpiece():
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = dict.fromkeys([*special, *WORDS, *LETTERS, *(f"##{c}" for c in LETTERS)])
    made = Tokenizer(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.add_special_tokens(special)
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    return made, names | {"unk_token": "[UNK]", "mask_token": "[MASK]"}


def unigram():
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    whole = [w for w in WORDS if w.isalpha()]
    pieces = [(token, 0.0) for token in special]
    pieces += [(f"▁{word}", -3 - i / 7) for i, word in enumerate(whole)]
    pieces += [("body", -4.0), (",", -3.5), (".", -3.6), ("▁", -2.5)]
    pieces += [(letter, -6 - i / 9) for i, letter in enumerate(LETTERS)]
    made = Tokenizer(models.Unigram([*pieces, ("<mask>", 0.0)], 3, False))
    made.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    made.add_special_tokens([*special, "<mask>"])
    names = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>"}
    return made, names | {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}


def byte_level():
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ye", "yes", "no"]
    merges = [("y", "e"), ("ye", "s"), ("n", "o")]
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(marks)
    return made, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


ROBERTA = {"type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
MODERN = {"num_hidden_layers": 4, "local_attention": 8, "pad_token_id": 0}
MODERN |= {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
GEMMA = {"num_hidden_layers": 6, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8}
GEMMA |= {"query_pre_attn_scalar": 16, "use_bidirectional_attention": True}
QWEN = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 640}
QWEN |= {"pad_token_id": 259, "bos_token_id": None, "eos_token_id": 261}
QWEN |= {"tie_word_embeddings": True}
CLASSIFIER = "Qwen3ForSequenceClassification"
LABELS = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
#: Folder -> class, tokenizer, fields of its config.
FOLDERS = {
    "bert": ("BertModel", wordpiece, {}),
    "bert-reranker": ("BertForSequenceClassification", wordpiece, {"num_labels": 1}),
    "xlm-roberta": ("XLMRobertaModel", unigram, ROBERTA),
    "xlm-roberta-reranker": (
        "XLMRobertaForSequenceClassification",
        unigram,
        ROBERTA | {"num_labels": 1},
    ),
    "modern-bert": ("ModernBertModel", wordpiece, MODERN),
    "modern-bert-reranker": (
        "ModernBertForSequenceClassification",
        wordpiece,
        MODERN | {"num_labels": 1, "classifier_pooling": "mean"},
    ),
    "nomic-bert": ("NomicBertModel", wordpiece, {}),
    "gemma-embedding": ("Gemma3TextModel", unigram, GEMMA),
    "jina-bert-v3": ("JinaEmbeddingsV3Model", unigram, {"pad_token_id": 1}),
    "qwen3-reranker": ("Qwen3ForCausalLM", byte_level, QWEN | {"tie_word_embeddings": False}),
    "qwen3-score-reranker": (
        "Qwen3ForSequenceClassification",
        byte_level,
        QWEN | {"num_labels": 1},
    ),
    "qwen3-labels-reranker": ("Qwen3ForSequenceClassification", byte_level, QWEN | LABELS),
}
#: The publisher's prompt, from the model card of Qwen3-Reranker.
PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
    "answer the query\n<Query>: {}\n<Document>: {}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def main():
    for name, (kind, tokenizer_of, more) in FOLDERS.items():
        torch.manual_seed(zlib.crc32(name.encode()))  # folders do not depend on each other
        folder = Path(sys.argv[1]) / name
        tokenizer, names = tokenizer_of()
        saved = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
        saved.save_pretrained(folder)
        made = getattr(transformers, kind)
        fields = SMALL | more | {"vocab_size": tokenizer.get_vocab_size()}
        model = made(made.config_class(**fields)).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * (0.25 if p.ndim == 1 else 0.12))
        model.save_pretrained(folder)
        model = made.from_pretrained(folder, attn_implementation="eager").double().eval()
        ids = [tokenizer.encode(text).ids for text in TEXTS]
        expected = {"texts": TEXTS, "ids": ids}
        with torch.no_grad():
            if "reranker" in name:
                pairs = [pair_of(tokenizer, document, kind) for document in DOCUMENTS]
                expected |= {
                    "query": QUERY,
                    "documents": DOCUMENTS,
                    "pairs": [p.ids for p in pairs],
                }
                found = [logits(model, pair, kind) for pair in pairs]
                expected["logits"] = [rounded(one[0]) for one in found]
                if len(found[0]) > 1:
                    expected["scores"] = [rounded(one.softmax(0)[0]) for one in found]
            else:
                vectors = (model(input_ids=torch.tensor([row])) for row in ids)
                expected["vectors"] = [
                    [[rounded(x) for x in token] for token in v.last_hidden_state[0]]
                    for v in vectors
                ]
        (folder / "expected.json").write_text(json.dumps(expected))


def rounded(x):
    """Rounds a number to digits that do not depend on the number of threads."""
    return round(x.item(), 9)


def pair_of(tokenizer, document, kind):
    if kind.startswith("Qwen"):
        return tokenizer.encode(PROMPT.format(QUERY, document))
    return tokenizer.encode(QUERY, document)


def logits(model, pair, kind):
    """Returns the logits of a pair, that of "yes" first."""
    types = {"token_type_ids": torch.tensor([pair.type_ids])} if kind.startswith("Bert") else {}
    found = model(input_ids=torch.tensor([pair.ids]), **types).logits[0]
    if kind == "Qwen3ForCausalLM":
        return found[-1, [257, 258]]  # yes, no
    return found.flip(0)


main()
