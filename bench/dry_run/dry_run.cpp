// What a launch would take, in exact bytes, from the engine's own code and without allocating it.
//
//   dry_run ENGINE_DIRECTORY < requests > answers
//
// A request is a line of tab-separated key=value pairs, an answer a line of JSON. Each request is served by a process
// of its own, so a failed assertion of the engine ends that request only. Keys, and what they are for llama-server:
//
//   model            -m, required
//   context          -c                    slots        --parallel
//   batch            -b                    micro_batch  -ub
//   type_k, type_v   -ctk, -ctv            flash        -fa on / off (1 / 0)
//   unified          --kv-unified          swa_full     --swa-full
//   rollback         copies of a recurrent state for tokens that may be taken back
//   outputs          rows of logits of a micro batch; 0 for all of its tokens
//   embeddings       --embeddings          repack       without --no-repack
//   mtp              load the blocks for multi-token prediction
//   draft            give the context that drafts with them instead of the main one
//   device           cpu, cuda or vulkan; the latter two are stand-ins, see below
//   gpu_layers       -ngl, -1 for all      cpu_experts  --n-cpu-moe
//   cache_on_host    --no-kv-offload
//   shares           --tensor-split, of as many cards; a single card without it
//   overlap          several cards have queues and events, as real ones do (1 / 0)
//
// An answer has n_ctx, n_ctx_seq and the buffers, or "refused" with the stage and the end of the engine's log.

#include "ggml-backend-impl.h"
#include "llama-ext.h"
#include "llama.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr unsigned request_limit_s = 60;
constexpr long     log_tail_bytes  = 2000;

// ---- Cards that are not there ---------------------------------------------------------------------------------------
//
// They take every operation and round sizes as the backend does whose name they have: CUDA aligns tensors to 128 bytes and
// lengthens quantised ones whose rows are no multiple of 512 values; Vulkan aligns to 16 bytes. Nothing is ever
// computed on them, and their memory is address space without access. Compute buffers on them are therefore not a real
// card's: there the operations have scratch space, and not all are taken.

constexpr size_t most_cards = 8;

struct stand_in {
    std::string              name;
    ggml_backend_device      device{};
    ggml_backend_buffer_type memory{};
};

stand_in         cards[most_cards];
size_t           card_count = 0;
bool             are_cuda   = false;
bool             overlap    = false; // they have queues and events, for which the engine overlaps micro batches
ggml_backend_reg maker{};

const stand_in & card_of(ggml_backend_dev_t device) { return *static_cast<stand_in *>(device->context); }

const char * maker_name() { return are_cuda ? "stand-in for CUDA" : "stand-in for Vulkan"; }

size_t tensor_bytes(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
    constexpr int64_t row = 512;
    const int64_t rest    = tensor->ne[0] % row;
    const bool    pad     = are_cuda && rest != 0 && ggml_is_quantized(tensor->type);
    return ggml_nbytes(tensor) + (pad ? ggml_row_size(tensor->type, row - rest) : 0);
}

ggml_backend_buffer_t take_memory(ggml_backend_buffer_type_t type, size_t bytes) {
    void * base = mmap(nullptr, std::max<size_t>(bytes, 1), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return nullptr;
    }
    ggml_backend_buffer_i calls{};
    calls.get_base      = [](ggml_backend_buffer_t buffer) { return buffer->context; };
    calls.free_buffer   = [](ggml_backend_buffer_t buffer) { munmap(buffer->context, std::max<size_t>(buffer->size, 1)); };
    calls.clear         = [](ggml_backend_buffer_t, uint8_t) {};
    calls.memset_tensor = [](ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {};
    calls.set_tensor    = [](ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t) {};
    calls.get_tensor    = [](ggml_backend_buffer_t, const ggml_tensor *, void *, size_t, size_t) { abort(); };
    return ggml_backend_buffer_init(type, calls, base, bytes);
}

ggml_backend_t start_card(ggml_backend_dev_t device, const char *) {
    static uint8_t id[16] = "lllm3090-card";
    auto * backend        = new ggml_backend{};
    backend->guid         = reinterpret_cast<ggml_guid_t>(&id);
    backend->device       = device;
    backend->iface.get_name      = [](ggml_backend_t self) { return card_of(self->device).name.c_str(); };
    backend->iface.free          = [](ggml_backend_t self) { delete self; };
    backend->iface.synchronize   = [](ggml_backend_t) {};
    backend->iface.graph_compute = [](ggml_backend_t, ggml_cgraph *) { return GGML_STATUS_FAILED; };
    return backend;
}

void make_card(size_t index) {
    stand_in & card = cards[index];
    card.name       = maker_name() + std::string(" ") + std::to_string(index);

    auto & memory         = card.memory.iface;
    card.memory.device    = &card.device;
    memory.get_name       = [](ggml_backend_buffer_type_t type) { return card_of(type->device).name.c_str(); };
    memory.get_alignment  = [](ggml_backend_buffer_type_t) -> size_t { return are_cuda ? 128 : 16; };
    memory.get_alloc_size = tensor_bytes;
    memory.alloc_buffer   = take_memory;

    auto & device          = card.device.iface;
    card.device.reg        = &maker;
    card.device.context    = &card;
    device.get_name        = [](ggml_backend_dev_t self) { return card_of(self).name.c_str(); };
    device.get_description = [](ggml_backend_dev_t) { return maker_name(); };
    device.get_type        = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; };
    device.get_memory      = [](ggml_backend_dev_t, size_t * unused, size_t * all) { *unused = *all = size_t{1} << 40; };
    device.get_props       = [](ggml_backend_dev_t self, ggml_backend_dev_props * props) {
        *props             = {};
        props->name        = card_of(self).name.c_str();
        props->description = maker_name();
        props->type        = GGML_BACKEND_DEVICE_TYPE_GPU;
        props->caps.async  = overlap;
        props->caps.events = overlap;
        self->iface.get_memory(self, &props->memory_free, &props->memory_total);
    };
    device.init_backend    = start_card;
    device.get_buffer_type = [](ggml_backend_dev_t self) { return &static_cast<stand_in *>(self->context)->memory; };
    device.supports_op     = [](ggml_backend_dev_t, const ggml_tensor *) { return true; };
    device.supports_buft   = [](ggml_backend_dev_t self, ggml_backend_buffer_type_t type) { return type == &card_of(self).memory; };
}

void plug_in_cards(size_t count, bool cuda, bool overlapping) {
    are_cuda   = cuda;
    overlap    = overlapping;
    card_count = count;
    for (size_t index = 0; index < count; index++) {
        make_card(index);
    }
    maker.api_version            = GGML_BACKEND_API_VERSION;
    maker.iface.get_name         = [](ggml_backend_reg_t) { return maker_name(); };
    maker.iface.get_device_count = [](ggml_backend_reg_t) { return card_count; };
    maker.iface.get_device       = [](ggml_backend_reg_t, size_t index) { return &cards[index].device; };
    ggml_backend_register(&maker);
}

// ---- Requests ------------------------------------------------------------------------------------------------------

class request {
  public:
    explicit request(const std::string & line) {
        for (size_t begin = 0; begin <= line.size();) {
            const size_t end    = std::min(line.find('\t', begin), line.size());
            const size_t equals = line.find('=', begin);
            if (equals >= end) {
                throw std::invalid_argument("no key=value: " + line.substr(begin, end - begin));
            }
            const std::string key = line.substr(begin, equals - begin);
            if (!known(key)) {
                throw std::invalid_argument("unknown key: " + key);
            }
            values[key] = line.substr(equals + 1, end - equals - 1);
            begin       = end + 1;
        }
        if (text("model").empty()) {
            throw std::invalid_argument("no model");
        }
    }

    std::string text(const std::string & key, const std::string & otherwise = "") const {
        const auto found = values.find(key);
        return found == values.end() ? otherwise : found->second;
    }

    int number(const std::string & key, int otherwise) const {
        const auto found = values.find(key);
        return found == values.end() ? otherwise : std::stoi(found->second);
    }

    // As --tensor-split names them; one where nothing is named.
    std::vector<float> shares() const {
        std::vector<float> found;
        const std::string  list = text("shares", "1");
        for (size_t begin = 0; begin <= list.size();) {
            const size_t end = std::min(list.find(',', begin), list.size());
            found.push_back(std::stof(list.substr(begin, end - begin)));
            begin = end + 1;
        }
        if (found.size() > most_cards) {
            throw std::invalid_argument("more than " + std::to_string(most_cards) + " cards: " + list);
        }
        return found;
    }

    bool flag(const std::string & key, bool otherwise = false) const { return number(key, otherwise) != 0; }

    ggml_type type(const std::string & key) const {
        const std::string name = text(key, "f16");
        for (int type = 0; type < GGML_TYPE_COUNT; type++) {
            const char * candidate = ggml_type_name(static_cast<ggml_type>(type));
            if (candidate != nullptr && name == candidate) {
                return static_cast<ggml_type>(type);
            }
        }
        throw std::invalid_argument("unknown cache type: " + name);
    }

  private:
    static bool known(const std::string & key) {
        static const std::vector<std::string> keys = {
            "model",   "context",  "slots",    "batch",   "micro_batch", "type_k", "type_v", "flash",  "unified",
            "swa_full", "rollback", "outputs", "embeddings", "repack",   "mtp",    "draft",  "device", "gpu_layers",
            "cpu_experts", "cache_on_host", "shares", "overlap",
        };
        return std::find(keys.begin(), keys.end(), key) != keys.end();
    }

    std::map<std::string, std::string> values;
};

std::string quoted(const std::string & text) {
    std::string result = "\"";
    for (const unsigned char c : text) {
        if (c == '"' || c == '\\') {
            result += '\\';
            result += static_cast<char>(c);
        } else if (c == '\n') {
            result += "\\n";
        } else {
            result += c >= 0x20 && c < 0x7f ? static_cast<char>(c) : '?';
        }
    }
    return result + '"';
}

void print_refusal(const std::string & stage, const std::string & log) {
    printf("{\"refused\":%s,\"log\":%s}\n", quoted(stage).c_str(), quoted(log).c_str());
    fflush(stdout);
}

// The experts of the first blocks, as --n-cpu-moe names them.
std::vector<std::string> expert_patterns(int blocks) {
    std::vector<std::string> patterns;
    for (int block = 0; block < blocks; block++) {
        patterns.push_back("blk\\." + std::to_string(block) + "\\.ffn_(up|down|gate|gate_up)_(ch|)exps");
    }
    return patterns;
}

// Exit statuses of a request's process; any other end is a failure of the engine.
enum outcome { answered = 0, no_model = 10, no_context = 11 };

outcome answer(const request & wanted) {
    const std::string  device = wanted.text("device", "cpu");
    std::vector<float> shares = wanted.shares();
    std::vector<ggml_backend_dev_t> devices; // explicit: whatever cards this machine has are left alone
    if (device != "cpu") {
        plug_in_cards(shares.size(), device == "cuda", wanted.flag("overlap", true));
        for (size_t index = 0; index < shares.size(); index++) {
            devices.push_back(&cards[index].device);
        }
    }
    devices.push_back(nullptr);
    shares.resize(llama_max_devices(), 0.0f);

    llama_model_params model_params = llama_model_default_params();
    model_params.devices            = devices.data();
    model_params.split_mode         = LLAMA_SPLIT_MODE_LAYER;
    model_params.tensor_split       = shares.data();
    model_params.no_alloc           = true;
    model_params.load_mode          = LLAMA_LOAD_MODE_NONE;
    model_params.use_extra_bufts    = wanted.flag("repack");
    model_params.load_mtp           = wanted.flag("mtp");
    model_params.n_gpu_layers       = wanted.number("gpu_layers", -1);

    const auto patterns = expert_patterns(wanted.number("cpu_experts", 0));
    std::vector<llama_model_tensor_buft_override> overrides;
    for (const auto & pattern : patterns) {
        overrides.push_back({pattern.c_str(), ggml_backend_cpu_buffer_type()});
    }
    overrides.push_back({nullptr, nullptr});
    model_params.tensor_buft_overrides = overrides.data();

    llama_context_params params  = llama_context_default_params();
    params.n_ctx                 = wanted.number("context", 4096);
    params.n_seq_max             = wanted.number("slots", 1);
    params.n_batch               = wanted.number("batch", 2048);
    params.n_ubatch              = wanted.number("micro_batch", 512);
    params.n_rs_seq              = wanted.number("rollback", 0);
    params.n_outputs_max         = wanted.number("outputs", 0);
    params.n_outputs_max_per_seq = 1;
    params.type_k                = wanted.type("type_k");
    params.type_v                = wanted.type("type_v");
    params.flash_attn_type = wanted.flag("flash", true) ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.kv_unified      = wanted.flag("unified");
    params.swa_full        = wanted.flag("swa_full");
    params.embeddings      = wanted.flag("embeddings");
    params.offload_kqv     = !wanted.flag("cache_on_host");
    params.ctx_type        = wanted.flag("draft") ? LLAMA_CONTEXT_TYPE_MTP : LLAMA_CONTEXT_TYPE_DEFAULT;

    llama_backend_init();
    llama_model * model = llama_model_load_from_file(wanted.text("model").c_str(), model_params);
    if (model == nullptr) {
        return no_model;
    }
    llama_context * context = llama_init_from_model(model, params);
    if (context == nullptr) {
        return no_context;
    }
    printf("{\"n_ctx\":%u,\"n_ctx_seq\":%u,\"buffers\":[", llama_n_ctx(context), llama_n_ctx_seq(context));
    const char * comma = "";
    for (const auto & [type, bytes] : llama_get_memory_breakdown(context)) {
        printf("%s{\"name\":%s,\"is_host\":%s,\"model\":%zu,\"context\":%zu,\"compute\":%zu}", comma,
               quoted(ggml_backend_buft_name(type)).c_str(), ggml_backend_buft_is_host(type) ? "true" : "false",
               bytes.model, bytes.context, bytes.compute);
        comma = ",";
    }
    printf("]}\n");
    fflush(stdout);
    return answered;
}

std::string end_of(FILE * log) {
    fseek(log, 0, SEEK_END);
    fseek(log, -std::min(ftell(log), log_tail_bytes), SEEK_END);
    std::string text(log_tail_bytes, '\0');
    text.resize(fread(text.data(), 1, text.size(), log));
    return text;
}

void serve(const request & wanted) {
    FILE * log = tmpfile();
    if (log == nullptr) {
        throw std::runtime_error("no temporary file for the engine's log");
    }
    const pid_t child = fork();
    if (child < 0) {
        throw std::runtime_error("no process for a request");
    }
    if (child == 0) {
        const rlimit none{0, 0};
        setrlimit(RLIMIT_CORE, &none);
        alarm(request_limit_s);
        dup2(fileno(log), STDERR_FILENO);
        // No destructors: what was made is gone with the process.
        _exit(answer(wanted));
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status)) {
        const bool late = WTERMSIG(status) == SIGALRM;
        print_refusal(late ? "timeout" : "signal " + std::to_string(WTERMSIG(status)), end_of(log));
    } else if (WEXITSTATUS(status) == no_model) {
        print_refusal("model", end_of(log));
    } else if (WEXITSTATUS(status) == no_context) {
        print_refusal("context", end_of(log));
    } else if (WEXITSTATUS(status) != answered) {
        print_refusal("exit " + std::to_string(WEXITSTATUS(status)), end_of(log));
    }
    fclose(log);
}

} // namespace

int main(int argc, char ** argv) try {
    if (argc != 2) {
        throw std::invalid_argument("usage: dry_run ENGINE_DIRECTORY < requests");
    }
    setenv("GGML_NO_BACKTRACE", "1", 1); // a failed assertion would start a debugger
    ggml_backend_load_all_from_path(argv[1]);
    for (std::string line; std::getline(std::cin, line);) {
        const request wanted(line);
        (void) wanted.type("type_k");
        (void) wanted.type("type_v");
        (void) wanted.shares();
        serve(wanted);
    }
    return 0;
} catch (const std::exception & error) {
    fprintf(stderr, "dry_run: %s\n", error.what());
    return 2;
}
