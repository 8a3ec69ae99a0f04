// Loads a TorchScript archive, runs it, prints what came out, and saves it again.
//
// Usage: roundtrip IN OUT ROWS COLUMNS [EXTRA...]
// The input is arange(ROWS * COLUMNS) / 8, which every float holds exactly.

// Not all operators: that halves the time to compile.
#define AT_PER_OPERATOR_HEADERS
#include <ATen/ops/arange.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include <cstdio>
#include <string>

int main(int count, char** words) {
  if (count < 5) {
    std::fprintf(stderr, "usage: roundtrip IN OUT ROWS COLUMNS [EXTRA...]\n");
    return 2;
  }
  try {
    torch::jit::ExtraFilesMap extra;
    for (int index = 5; index < count; ++index) {
      extra[words[index]] = "";
    }
    auto module = torch::jit::load(std::string(words[1]), std::nullopt, extra);
    for (const auto& entry : extra) {
      std::printf("extra %s %s\n", entry.first.c_str(), entry.second.c_str());
    }
    for (const auto& entry : module.named_parameters()) {
      std::printf("parameter %s %d\n", entry.name.c_str(), int(entry.value.requires_grad()));
    }
    for (const auto& entry : module.named_buffers()) {
      std::printf("buffer %s\n", entry.name.c_str());
    }
    const int64_t rows = std::stoll(words[3]), columns = std::stoll(words[4]);
    auto input = at::arange(rows * columns, at::kFloat).div(8).reshape({rows, columns});
    auto output = module.forward({input}).toTensor().contiguous().flatten();
    for (int64_t index = 0; index < output.numel(); ++index) {
      std::printf("output %a\n", output.data_ptr<float>()[index]);
    }
    module.save(words[2], extra);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
