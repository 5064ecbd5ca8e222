# Filled by the packaging work: targets, headers, tesseraConfig.cmake.
