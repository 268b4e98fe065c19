//! The front door: OpenAI HTTP and gRPC text in, token ids to the conductor.
