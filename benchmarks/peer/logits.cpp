// Logits of every position of one token sequence, through llama.cpp's public C API.
//   logits MODEL.gguf IDS.i32 OUT.f32 [UBATCH]
// IDS holds native int32 token ids, OUT receives float32 [tokens, vocab]. The caches are F32 and
// flash attention is off, so that what is compared is the arithmetic on the weights.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

#include "llama.h"

static int fail(const char * what) {
    std::fprintf(stderr, "logits: %s\n", what);
    return 1;
}

int main(int argc, char ** argv) {
    if (argc < 4) {
        return fail("usage: logits MODEL.gguf IDS.i32 OUT.f32 [UBATCH]");
    }
    std::ifstream in(argv[2], std::ios::binary);
    const std::vector<char> raw((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    const auto * ids = reinterpret_cast<const int32_t *>(raw.data());
    const int32_t count = static_cast<int32_t>(raw.size() / sizeof(int32_t));
    if (count == 0) {
        return fail("no token ids");
    }

    llama_backend_init();
    llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers = 0;
    llama_model * model = llama_model_load_from_file(argv[1], model_params);
    if (model == nullptr) {
        return fail("the model did not load");
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = static_cast<uint32_t>((count + 255) / 256 * 256);
    params.n_batch = static_cast<uint32_t>(count);
    params.n_ubatch = argc > 4 ? static_cast<uint32_t>(std::atoi(argv[4])) : params.n_batch;
    params.n_threads = params.n_threads_batch = 2;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context * context = llama_init_from_model(model, params);
    if (context == nullptr) {
        return fail("no context");
    }

    llama_batch batch = llama_batch_init(count, 0, 1);
    batch.n_tokens = count;
    for (int32_t i = 0; i < count; ++i) {
        batch.token[i] = ids[i];
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    if (llama_decode(context, batch) != 0) {
        return fail("decode failed");
    }
    const int32_t vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::ofstream out(argv[3], std::ios::binary);
    for (int32_t i = 0; i < count; ++i) {
        const float * row = llama_get_logits_ith(context, i);
        out.write(reinterpret_cast<const char *>(row), static_cast<std::streamsize>(vocab) * 4);
    }
    llama_batch_free(batch);
    llama_free(context);
    llama_model_free(model);
    return out.good() ? 0 : fail("the output was not written");
}
