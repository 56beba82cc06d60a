from gated_qwen.cli import main

main()
