{
  description = "rocm-kernels: FP8 decode kernels for AMD Instinct GPUs, with CUDA and CPU builds";

  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs =
    { self, kernel-builder, ... }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
      # What the tests that `nix run .#ci-test` collects import beyond torch, kernels and pytest.
      pythonCheckInputs =
        python: with python; [
          hypothesis
          ml-dtypes
          numpy
        ];
    };
}
