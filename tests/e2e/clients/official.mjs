// Packages for tests in other folders: only here are the node packages found.
export { default as OpenAI } from 'openai';
export { generateText } from 'ai';
export { createOpenAICompatible } from '@ai-sdk/openai-compatible';
export { ChatOpenAI } from '@langchain/openai';
