"""llama.cpp's server, in this process on a free local port, and what the tests ask it for."""

import json
import urllib.request

import torch
import xllamacpp

# Straight to the server on this machine, whatever proxy the environment names.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class LlamaServer:
    """A server with one model.

    Args:
        file: a GGUF file.
        exact: keep keys and values in fp32 and compute attention in fp32; otherwise llama.cpp's defaults, where the
            cache is in fp16.
    """

    def __init__(self, file, exact=True):
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx, params.n_parallel, params.cache_ram_mib = 256, 1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.warmup, params.verbosity = False, -1
        if exact:
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server = xllamacpp.Server(params)

    def _request(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.server.listening_address + path, data=data, headers={"Content-Type": "application/json"}
        )
        with OPENER.open(request, timeout=60) as response:
            return json.load(response)

    def log_probabilities(self, token_ids, vocab_size, reuse=False):
        """Log-probabilities (vocab_size,) of the token that follows `token_ids`; `reuse` what is in the cache."""
        body = {"prompt": token_ids, "n_predict": 1, "n_probs": vocab_size, "cache_prompt": reuse}
        # The server reports them for a token that it can show as text, so it is made to take "!"; they are computed
        # before such a bias.
        body["logit_bias"] = [["!", 1000.0]]
        entries = self._request("/completion", body)["completion_probabilities"][0]["top_logprobs"]
        result = torch.full((vocab_size,), float("nan"))
        for entry in entries:
            result[entry["id"]] = entry["logprob"]
        return result

    def greedy(self, token_ids, count):
        """The `count` tokens that follow `token_ids`, each the likeliest."""
        body = {"prompt": token_ids, "n_predict": count, "temperature": 0, "return_tokens": True}
        return self._request("/completion", body)["tokens"]

    def tokenize(self, text, add_special=True):
        """Token ids of a text in which special tokens are read as such."""
        return self._request("/tokenize", {"content": text, "add_special": add_special})["tokens"]

    def detokenize(self, token_ids):
        return self._request("/detokenize", {"tokens": token_ids})["content"]

    def apply_template(self, messages):
        """The prompt that the model's chat template makes of a conversation."""
        return self._request("/apply-template", {"messages": messages})["prompt"]

    def properties(self):
        return self._request("/props")
