# Which C++ compiler is taken, decided before CMake looks for one: CMAKE_CXX_COMPILER or CXX, else one on PATH. With
# RELIVE_ZIG, or where there is none, it is Zig's, if the package ziglang can be imported by ${Python_EXECUTABLE}.

function(needs_compiler reason)
  message(FATAL_ERROR "relive needs a C++20 compiler to build its core, and ${reason}.\n"
    "Either install one, such as g++ 12 or clang++ 14 or newer; if it is not on PATH, name it in CXX.\n"
    "Or set RELIVE_ZIG=1 for this one installation, `RELIVE_ZIG=1 pip install .`: it then downloads one, which is "
    "in the Python package `ziglang`, and needs nothing else.\n")
endfunction()

# Visual Studio finds its compilers by itself. It has to be told to take clang-cl, which knows GNU's extensions.
if(CMAKE_GENERATOR MATCHES "Visual Studio")
  if(NOT CMAKE_GENERATOR_TOOLSET MATCHES "^[Cc]lang[Cc][Ll]")
    needs_compiler("MSVC lacks extensions of C++ that the core uses: set CMAKE_GENERATOR_TOOLSET=ClangCL")
  endif()
elseif(NOT CMAKE_CXX_COMPILER)
  # scikit-build-core sets CXX, where nobody has, to what Python itself was compiled with, which may not be here
  separate_arguments(words UNIX_COMMAND "$ENV{CXX}")
  if(words)
    list(POP_FRONT words first)
  endif()
  if(NOT RELIVE_ZIG)
    find_program(RELIVE_CXX NAMES ${first} c++ g++ clang++)
    if(RELIVE_CXX)
      find_program(RELIVE_NAMED NAMES ${first})
      if(NOT RELIVE_NAMED)
        set(CMAKE_CXX_COMPILER "${RELIVE_CXX}" CACHE FILEPATH "")
      endif()
    endif()
  endif()
  if(NOT RELIVE_CXX)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c "import os, ziglang; print(os.path.dirname(ziglang.__file__), end='')"
      OUTPUT_VARIABLE ziglang RESULT_VARIABLE failed ERROR_QUIET)
    if(failed)
      if(RELIVE_ZIG)
        needs_compiler("RELIVE_ZIG is set, but ${Python_EXECUTABLE} cannot import `ziglang`")
      endif()
      needs_compiler("there is no c++, g++ or clang++ on PATH")
    endif()
    # CMake wants each tool as one program. Zig compiles for the processor it runs on unless it is told
    # otherwise, and its C++ library anew for each kind of optimization.
    set(flags " -mcpu=baseline -O2 -Wno-macro-redefined")
    foreach(tool IN ITEMS c++ ar ranlib)
      file(WRITE "${CMAKE_BINARY_DIR}/zig/${tool}" "#!/bin/sh\nexec '${ziglang}/zig' ${tool}${flags} \"$@\"\n")
      file(CHMOD "${CMAKE_BINARY_DIR}/zig/${tool}"
        PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
      set(flags "")
    endforeach()
    set(CMAKE_CXX_COMPILER "${CMAKE_BINARY_DIR}/zig/c++" CACHE FILEPATH "")
    set(CMAKE_AR "${CMAKE_BINARY_DIR}/zig/ar" CACHE FILEPATH "")
    set(CMAKE_RANLIB "${CMAKE_BINARY_DIR}/zig/ranlib" CACHE FILEPATH "")
    set(CMAKE_CXX_COMPILER_AR "${CMAKE_BINARY_DIR}/zig/ar" CACHE FILEPATH "")
    set(CMAKE_CXX_COMPILER_RANLIB "${CMAKE_BINARY_DIR}/zig/ranlib" CACHE FILEPATH "")
  endif()
endif()
