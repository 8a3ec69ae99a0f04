// Loads an archive, runs it, and saves it again with its extra files: all that C++ users do.
#include <torch/script.h>

#include <iostream>

int main(int argc, char** argv) {
  torch::jit::ExtraFilesMap files{{"labels.txt", ""}, {"modkit.json", ""}};
  torch::jit::Module module = torch::jit::load(argv[1], c10::nullopt, files);
  module.eval();
  std::cout << "labels " << files["labels.txt"] << "\n";
  for (const auto& parameter : module.named_parameters()) {
    std::cout << parameter.name << " " << parameter.value.requires_grad() << "\n";
  }
  std::vector<torch::jit::IValue> inputs{torch::arange(8, torch::kFloat).view({2, 4})};
  torch::Tensor output = module.forward(inputs).toTensor();
  std::cout << "output";
  for (int64_t i = 0; i < output.numel(); ++i) {
    std::cout << " " << output.view(-1)[i].item<double>();
  }
  std::cout << std::endl;
  module.save(argv[2], files);
  return 0;
}
