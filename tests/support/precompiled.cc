// This file has no code: it is the only source file of the library that precompiles the tests'
// headers.
