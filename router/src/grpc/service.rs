//! The methods of `tutti.v1.Inference`.

use std::sync::Arc;

use futures_util::stream::BoxStream;
use tonic::{Request, Response, Status};
use tutti_proto::v1::{
    GenerateRequest, GenerateResponse, GetModelRequest, GetModelResponse, inference_server::Inference,
};
use tutti_runtime::Error;

use super::{generate, request};
use crate::generation::{Arrival, Generator};

/// Implements `tutti.v1.Inference`.
pub struct InferenceService {
    generator: Arc<Generator>,
}

impl InferenceService {
    /// Creates the service on the generator that the HTTP API uses as well.
    pub fn new(generator: Arc<Generator>) -> Self {
        Self { generator }
    }

    fn count<T>(&self, route: &str, result: Result<T, Error>) -> Result<T, Status> {
        let result = result.map_err(Status::from);
        let code = result.as_ref().map_or_else(Status::code, |_| tonic::Code::Ok);
        self.generator.metrics().answered(route, &format!("{code:?}"));
        result
    }

    async fn start(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<BoxStream<'static, Result<GenerateResponse, Status>>, Error> {
        let (metadata, extensions, message) = request.into_parts();
        let (wanted, kind) = request::read(message, &metadata)?;
        let arrival = Arrival::of(metadata.as_ref(), &extensions);
        let started = self.generator.start(wanted, arrival).await;
        let generation = started.map_err(|error| request::respell(error, kind))?;
        Ok(generate::respond(self.generator.clone(), generation, kind))
    }
}

#[tonic::async_trait]
impl Inference for InferenceService {
    type GenerateStream = BoxStream<'static, Result<GenerateResponse, Status>>;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let started = self.start(request).await;
        self.count("tutti.v1.Inference/Generate", started).map(Response::new)
    }

    async fn get_model(&self, _: Request<GetModelRequest>) -> Result<Response<GetModelResponse>, Status> {
        let model = self.count("tutti.v1.Inference/GetModel", self.generator.model())?;
        let description = &model.description;
        Ok(Response::new(GetModelResponse {
            name: description.served_name.clone(),
            max_context_tokens: model.max_model_len(),
            vocab_size: description.vocab_size,
            eos_token_ids: description.eos_token_ids.clone(),
            has_tokenizer: model.text.tokenizer.is_some(),
            has_chat_template: model.text.template().is_ok(),
        }))
    }
}
