// Vercel's AI SDK: tools whole and streamed in loops of several steps, and objects of a schema. Prints what it got, as
// JSON. Takes the address and the markers from the environment (test_ai_sdk.py).
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, streamText, stepCountIs, tool, Output } from 'ai';
import { z } from 'zod';

const { BASE_URL, MODEL, LOOP, PERSON } = process.env;
const provider = createOpenAICompatible({
  name: 'tutti', baseURL: BASE_URL, apiKey: 'unused', includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider(MODEL);
const weather = { Paris: 'sunny, 21 degrees', Oslo: 'snowy, -3 degrees' };
const tools = {
  get_weather: tool({
    description: 'The weather of a city', inputSchema: z.object({ city: z.string() }), execute: async ({ city }) => weather[city],
  }),
};
const loop = { model, tools, stopWhen: stepCountIs(5), prompt: `How is the weather? (${LOOP})`, maxRetries: 0 };

const whole = await generateText(loop);
const streaming = streamText(loop);
let parts = 0;
let text = '';
for await (const part of streaming.fullStream) {
  if (part.type === 'error') throw part.error;
  parts += part.type === 'text-delta' ? 1 : 0;
  text += part.type === 'text-delta' ? part.text : '';
}
const person = z.object({ name: z.string(), age: z.number().int(), languages: z.array(z.string()) });
const object = await generateText({ model, output: Output.object({ schema: person }), prompt: `Who is it? (${PERSON})`, maxRetries: 0 });
const calls = (steps) => steps.flatMap((step) => step.toolCalls.map((call) => [call.toolName, call.input]));
console.log(JSON.stringify({
  whole: { text: whole.text, calls: calls(whole.steps), steps: whole.steps.length, finish: whole.finishReason },
  streamed: { text, calls: calls(await streaming.steps), parts, finish: await streaming.finishReason },
  object: object.output,
}));
