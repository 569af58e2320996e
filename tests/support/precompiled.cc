// The file of the library that precompiles the headers of the tests.
