//! The model and its weights.

use std::path::PathBuf;

settings! {
    /// The model, and its limits for clients.
    pub struct ModelSettings {
        "Model" => {
            /// Hugging Face checkpoint, a directory or a hub id; or a GGUF file, also ORG/NAME/FILE.gguf of a hub
            model: Option<String> = None, unit "DIR|FILE|HUB_ID", default "the small model in this binary";
            /// Name of the model in the API, or several with commas between them; answers have the first
            served_model_name: Option<String> = None, unit "NAME[,NAME]...", default "the hub id or the directory's name";
            /// Limit of one request, prompt and output together
            max_model_len: Option<u32> = None, unit "TOKENS", default "the model's own limit", at least 1;
        }
    }
}

settings! {
    /// The form in which a worker loads weights.
    pub struct WeightSettings {
        "Model" => {
            /// Source of the weights
            load_format: LoadFormat = LoadFormat::Auto;
            /// Quantisation of weights and activations
            quantize: Quantize = Quantize::None;
            /// Keep activations in f32 where weights have four bits: slower, and as exact as the weights
            no_quantized_activations: bool = false;
            /// Directory for weights in the CPU's layout; later starts map them, and workers share them
            packed_weights: Option<PathBuf> = None, unit "DIR";
            /// Hold no int8 copy of the LM head, with which a CPU finds greedy tokens faster
            no_screened_head: bool = false;
            /// Load the model even if its weights and smallest planes take more than the free memory
            no_memory_check: bool = false;
        }
    }
}

choices! {
    /// The source of weights.
    pub enum LoadFormat {
        /// The checkpoint's safetensors files.
        Auto = "auto",
        /// Seeded random weights in the shapes and the type of `config.json`, the only file needed.
        Dummy = "dummy",
    }
}

choices! {
    /// The form in which a device holds weight matrices.
    pub enum Quantize {
        /// As the checkpoint stores them.
        None = "none",
        /// Eight bits per weight with a scale for each group of inputs. CPUs quantise activations to eight bits, too.
        Int8 = "int8",
        /// Four bits per weight with a scale for each group of 32 inputs, and eight bits for the embedding and the LM
        /// head. CPUs quantise activations to eight bits, too.
        Int4 = "int4",
    }
}

impl ModelSettings {
    /// The names of `served_model_name`; none if it is not set.
    pub fn served_names(&self) -> Vec<&str> {
        self.served_model_name.iter().flat_map(|names| names.split(',').map(str::trim)).collect()
    }
}
