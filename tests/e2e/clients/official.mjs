// Packages for tests in other folders: only here are the node packages found.
export { default as OpenAI } from 'openai';
