// The source file of the library that precompiles the tests' headers.
